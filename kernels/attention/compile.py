"""Attention kernels compiled ahead of time, for GPUs that are not here: registers, spills, shared memory, opcodes."""

from __future__ import annotations

from typing import Any

from quantbench.kernels.attention.backward import attention_backward_kv, attention_backward_q, attention_delta
from quantbench.kernels.attention.forward import attention_forward
from quantbench.kernels.attention.menu import Setting, split_head_dim
from quantbench.kernels.compile import KernelResources, compile_kernel

from quantbench.launch import Tile
from quantbench.workload.dtypes import DTYPES

DELTA_TILE = Tile(64, 16, num_warps=4, stages=1)
_VECTOR_BYTES = 16
_MAX_REGISTERS = 255  # per thread, every compute capability. Source: CUDA C++ Programming Guide 13.0


def compile_forward(
    setting: Setting, head_dim: int, arch: int, *, dtype: str = "bf16", causal: bool = True, descriptors: bool
) -> KernelResources:
    """Compile for sm_`arch` what forward on contiguous tensors runs; sequences that no block divides evenly."""
    tile = setting.tile
    types, constants = _common(("q", "k", "v"), head_dim, tile, dtype, causal, descriptors)
    types |= _strides("o", head_dim) | dict.fromkeys(("all_heads", "heads", "kv_group", "side_by_side"), "i32")
    types |= {"o": f"*{dtype}:16", "lse": "*fp32:16", "scale_log2e": "fp32"}
    constants |= {"EVEN_K": False, "OVERLAP": setting.schedule == "overlapped", "O_ROW_STRIDE": head_dim}
    return _compile(attention_forward, types, constants, tile, dtype, arch)


def compile_backward_kv(
    tile: Tile, head_dim: int, arch: int, *, dtype: str = "bf16", causal: bool = True, descriptors: bool
) -> KernelResources:
    """As `compile_forward`, for the kernel that keeps k and v."""
    types, constants = _backward(tile, head_dim, dtype, causal, descriptors)
    types |= {"dk": f"*{dtype}:16", "dv": f"*{dtype}:16", "kv_heads": "i32"}
    return _compile(attention_backward_kv, types, constants | {"EVEN_Q": False}, tile, dtype, arch)


def compile_backward_q(
    tile: Tile, head_dim: int, arch: int, *, dtype: str = "bf16", causal: bool = True, descriptors: bool
) -> KernelResources:
    """As `compile_forward`, for the kernel that keeps q."""
    types, constants = _backward(tile, head_dim, dtype, causal, descriptors)
    types |= {"dq": f"*{dtype}:16", "heads": "i32"}
    return _compile(attention_backward_q, types, constants | {"EVEN_K": False}, tile, dtype, arch)


def compile_delta(head_dim: int, arch: int, *, dtype: str = "bf16") -> KernelResources:
    """As `compile_forward`, for the kernel that adds up o · do."""
    main, tail = split_head_dim(head_dim)
    types = {"o": f"*{dtype}:16", "do": f"*{dtype}:16", "delta": "*fp32:16", "heads": "i32", "seq_q": "i32"}
    types |= _strides("o", head_dim) | _strides("do", head_dim)
    constants = {
        "HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "ALIGN": aligned(dtype, head_dim),
        "O_ROW_STRIDE": head_dim, "DO_ROW_STRIDE": head_dim, "BLOCK_M": DELTA_TILE.block_m,
    }  # fmt: skip
    return _compile(attention_delta, types, constants, DELTA_TILE, dtype, arch)


def aligned(dtype: str, *sizes: int) -> int:
    """Elements that a thread can move at a time where rows begin at multiples of all `sizes`.

    >>> aligned("bf16", 96), aligned("bf16", 100, 1600), aligned("fp32", 96)
    (8, 4, 4)
    """
    widest = _VECTOR_BYTES // DTYPES[dtype].element_bytes
    return min([widest, *(size & -size for size in sizes if size)])


def box(rows: int, columns: int) -> list[int]:
    """What one descriptor load moves of [batch, head, row, head_dim]."""
    return [1, 1, rows, columns]


def _backward(
    tile: Tile, head_dim: int, dtype: str, causal: bool, descriptors: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    types, constants = _common(("q", "k", "v", "do"), head_dim, tile, dtype, causal, descriptors)
    types |= {"lse": "*fp32:16", "delta": "*fp32:16", "kv_group": "i32", "scale": "fp32", "scale_log2e": "fp32"}
    return types, constants


def _common(
    inputs: tuple[str, ...], head_dim: int, tile: Tile, dtype: str, causal: bool, descriptors: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    main, tail = split_head_dim(head_dim)
    types, constants = {"seq_q": "i32", "seq_k": "i32"}, {}
    for name in inputs:
        types |= _strides(name, head_dim)
        constants[f"{name.upper()}_ROW_STRIDE"] = 0 if descriptors else head_dim
        rows = tile.block_n if name in ("k", "v") else tile.block_m
        types[name] = f"tensordesc<{dtype}{box(rows, main)}>" if descriptors else f"*{dtype}:16"
        if descriptors and tail:
            types[f"{name}_tail"] = f"tensordesc<{dtype}{box(rows, tail)}>"
        else:
            constants[f"{name}_tail"] = None
    constants |= {
        "HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "ALIGN": aligned(dtype, head_dim), "CAUSAL": causal,
        "DESCRIPTORS": descriptors, "PRECISION": precision(dtype), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip
    return types, constants


def precision(dtype: str) -> str:
    """How products are computed: fp32 ones in fp32, without tensor cores."""
    return "ieee" if dtype == "fp32" else "tf32"


def _strides(name: str, head_dim: int) -> dict[str, str]:
    """Of a contiguous tensor whose sequence length is even: all are multiples of 16 when 2 · head_dim is."""
    stride = "i32:16" if head_dim % 16 == 0 else "i32"
    return {f"{name}_batch_stride": stride, f"{name}_head_stride": stride}


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile, dtype: str, arch: int
) -> KernelResources:
    options = backend_options(tile, dtype, constants["ALIGN"], constants.get("CAUSAL", True))
    return compile_kernel(
        kernel, types, constants, arch, options.pop("num_warps"), options.pop("num_stages"), **options
    )


def backend_options(tile: Tile, dtype: str = "bf16", align: int = 8, causal: bool = True) -> dict[str, int]:
    """num_warps and num_stages. For rows that are loaded in less than 16 bytes at a time under a full mask also the
    register limit that up to 8 warps have anyway: without it ptxas halves it, and spills, for the sake of a second
    block. (Where it does not, stating the limit makes its code worse, so it is not stated.)"""
    options = {"num_warps": tile.num_warps or 4, "num_stages": tile.stages or 2}
    narrow = align * DTYPES[dtype].element_bytes < _VECTOR_BYTES
    return options | ({"maxnreg": _MAX_REGISTERS} if narrow and not causal and options["num_warps"] <= 8 else {})
