"""Softmax kernels compiled ahead of time, for GPUs that are not here: registers, spills, shared memory, opcodes."""

from __future__ import annotations

from quantbench.kernels.compile import KernelResources, compile_kernel
from quantbench.kernels.softmax_kernels import softmax_backward, softmax_forward
from quantbench.kernels.softmax_tile import softmax_tile, vector_elements

from quantbench.workload.dtypes import DTYPES


def compile_softmax(
    cols: int, *, direction: str = "forward", mask: str = "causal", dtype: str = "fp16", arch: int
) -> KernelResources:
    """Compile for sm_`arch` what a launch on contiguous scores with `cols` columns and as many rows would run.

    mask: causal, full or none. direction: forward or backward.
    """
    element_bytes = DTYPES[dtype].element_bytes
    tile = softmax_tile(cols, element_bytes, direction)
    size = "i32:16" if cols % 16 == 0 else "i32"
    tensors = ("x", "y") if direction == "forward" else ("dy", "y", "dx")
    types = dict.fromkeys(tensors, f"*{dtype}:16") | {"rows_in_all": "i32", "rows_per_head": size, "cols": size}
    constants = {
        "MASK": "none" if direction == "backward" and mask == "full" else mask,
        "ALIGN": vector_elements(cols, element_bytes), "ROWS": tile.block_m, "BLOCK_COLS": tile.block_n,
    }  # fmt: skip
    if direction == "forward":
        types |= {"rows_per_sample": size, "mask_rows_per_sample": size, "scale_log2e": "fp32"}
        if mask == "full":
            types["mask"] = "*u8:16"
        else:
            constants["mask"] = None
    else:
        types["scale"] = "fp32"
    kernel = softmax_forward if direction == "forward" else softmax_backward
    return compile_kernel(kernel, types, constants, arch, tile.num_warps or 4, 1)
