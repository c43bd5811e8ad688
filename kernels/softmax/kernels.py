"""Scale, mask and softmax in one pass over the scores, forward and backward, as Megatron-LM fuses them.

y = softmax(scale · x) over rows of `cols` scores. Nothing here multiplies matrices: the time is the time to read x and
to write y, and the kernel is good when it moves bytes as fast as a copy does.

What is tiled: a program (one thread block) holds ROWS whole rows in registers, read once and written once. Short rows
share a program, so that each has some 4096 scores to load at a time; long ones have it for themselves.

The cliffs:
- cols % ALIGN. A thread reads 16 bytes at a time only if every row starts at a multiple of 16 bytes: 8 scores of 16
  bits. For an odd number of columns it reads 2 bytes at a time, and the same bytes take several times the instructions.
- A row takes the next power of two of registers: 2049 columns hold, exponentiate and add up 4096. Nothing is read for
  the rest, so this shows only where the arithmetic no longer hides behind the memory.
- Under a causal mask row q reads q + 1 scores, rounded up to 16 bytes, and writes all of them: half the reads, and
  programs of one launch that differ in length.

The exponential is of base 2 (one instruction) with log₂e folded into the scale.

`softmax_tile` sizes a program, `compile_softmax` compiles the kernels ahead of time for a GPU that is not here.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in triton's own kernels)

import triton
import triton.language as tl
from quantbench.kernels.compile import KernelResources, compile_kernel

from quantbench.errors import require_int
from quantbench.launch import Tile
from quantbench.workload.dtypes import DTYPES

#: Longest row: its 64 bytes of loads per thread fill the largest block of 1024 threads.
MAX_COLS = 16_384

_WARP_THREADS = 32
_MAX_WARPS = 32
_MIN_BLOCK_COLS = 16
_VECTOR_BYTES = 16
# Four 16-byte loads under way per thread. What keeps HBM busy is bytes in flight (Little's law: 4.8 TB/s times some
# 0.7 µs is 25 KB for each of an H200's 132 SMs), and more of them per thread costs the registers of another block.
_BYTES_PER_THREAD = 4 * _VECTOR_BYTES
# Scores per program, at least: blocks that move less than 16 KB come and go faster than they are handed out.
_MIN_SCORES = 4096

#: What Megatron-LM puts in place of masked scores, times log₂e. A row that is masked whole comes out as 1 / cols
#: (Megatron-LM's and apex' kernels; apex issue 1390): it is not dropped.
MASKED_LOG2E = tl.constexpr(-10_000.0 * 1.4426950408889634)


@triton.jit
def softmax_forward(
    x, mask, y, rows_in_all, rows_per_head, rows_per_sample, mask_rows_per_sample, cols, scale_log2e,
    MASK: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """y = softmax(scale · x): grid (ceil(rows_in_all / ROWS)).

    x, y: contiguous [rows_in_all, cols], rows_in_all = batch · heads · rows_per_head. MASK: "causal" (row q of a head
    drops columns past q), "full" (mask: bytes [samples, rows_per_head, cols], other than 0 drops; one for all samples
    when mask_rows_per_sample is 0) or "none". ALIGN: scores per vector, divides cols. BLOCK_COLS: power of two, at
    least cols. scale_log2e: above 0.
    """
    first_row, rows, col, length = _tile(cols, ALIGN, ROWS, BLOCK_COLS)
    position = rows % rows_per_head
    readable, counts = _columns(position, col, length, MASK, ALIGN)
    inside = rows < rows_in_all
    at = first_row.to(tl.int64) * length + (rows - first_row) * length + col
    scores = tl.load(x + at, mask=inside & readable, other=0.0).to(tl.float32)
    if MASK == "full":
        mask_row = rows // rows_per_sample * mask_rows_per_sample + position
        masked = tl.load(mask + mask_row.to(tl.int64) * length + col, mask=inside & readable, other=0)
        scores = tl.where(masked != 0, MASKED_LOG2E, scores * scale_log2e)
        scores = tl.where(counts, scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    else:
        scores = tl.where(counts, scores, float("-inf"))
        # The difference first, which is exact for 16-bit scores: large scores cost no accuracy.
        p = tl.exp2((scores - tl.max(scores, 1)[:, None]) * scale_log2e)
    p *= (1.0 / tl.sum(p, 1))[:, None]
    tl.store(y + at, p.to(y.dtype.element_ty), mask=inside & (col < length))


@triton.jit
def softmax_backward(
    dy, y, dx, rows_in_all, rows_per_head, cols, scale,
    MASK: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx = scale · y · (dy - Σ dy · y): grid and arguments as in `softmax_forward`; the sum is in fp32.

    What the mask dropped has y = 0 and gets 0; under a causal mask it is not even read.
    """
    first_row, rows, col, length = _tile(cols, ALIGN, ROWS, BLOCK_COLS)
    readable, counts = _columns(rows % rows_per_head, col, length, MASK, ALIGN)
    inside = rows < rows_in_all
    at = first_row.to(tl.int64) * length + (rows - first_row) * length + col
    g = tl.load(dy + at, mask=inside & readable, other=0.0).to(tl.float32)
    p = tl.load(y + at, mask=inside & readable, other=0.0).to(tl.float32)
    if MASK == "causal":
        g = tl.where(counts, g, 0.0)
        p = tl.where(counts, p, 0.0)
    total = tl.sum(g * p, 1)
    out = scale * p * (g - total[:, None])
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside & (col < length))


@triton.jit
def _tile(cols, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """This program's first row, its rows (ROWS × 1), the columns (1 × BLOCK_COLS), and the length of a row."""
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)[:, None]
    return first_row, rows, tl.arange(0, BLOCK_COLS)[None, :], cols // ALIGN * ALIGN


@triton.jit
def _columns(position, col, length, MASK: tl.constexpr, ALIGN: tl.constexpr):
    """Which columns are read, whole vectors of ALIGN, and which of these count."""
    if MASK == "causal":
        readable = col < (position // ALIGN + 1) * ALIGN
        counts = col <= position
    else:
        readable = col < length
        counts = readable
    return readable, counts


def softmax_tile(cols: int, element_bytes: int, direction: str = "forward") -> Tile:
    """Rows (block_m), row length rounded up to a power of two (block_n) and warps of a softmax program.

    Backward loads two scores where forward loads one.

    >>> softmax_tile(2048, 2)
    Tile(block_m=2, block_n=2048, block_k=None, split_k=1, stages=None, num_warps=4)
    """
    require_int("softmax", "cols", cols, high=MAX_COLS)
    block_cols = max(_MIN_BLOCK_COLS, 1 << (cols - 1).bit_length())
    loaded_bytes = element_bytes * (1 if direction == "forward" else 2)
    rows = max(1, _MIN_SCORES // block_cols)
    threads = rows * block_cols * loaded_bytes // _BYTES_PER_THREAD
    return Tile(rows, block_cols, num_warps=min(_MAX_WARPS, threads // _WARP_THREADS))


def vector_elements(cols: int, element_bytes: int) -> int:
    """Scores that a thread can move at a time in rows of `cols`: the largest power of two that divides it, 16 bytes at
    most.

    >>> vector_elements(2048, 2), vector_elements(2052, 2), vector_elements(2049, 2)
    (8, 4, 1)
    """
    return min(_VECTOR_BYTES // element_bytes, cols & -cols)


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
