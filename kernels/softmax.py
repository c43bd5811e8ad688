"""Implements Megatron-LM's fused scale + mask + softmax in Triton, with gradients.

    y = scaled_causal_softmax(scores, 0.125)              # scores, y: [batch, heads, sq, sk]
    y = scaled_masked_softmax(scores, mask, 0.125)        # mask: [batch, 1, sq, sk], True drops

    work = plan_forward(scores, 0.125, causal=True)       # checked, compiled, allocated
    work.run()                                            # the launch alone; fits a CUDA graph

The kernel computes y = softmax(scale · x) for each row of `cols` scores. It reads x once and writes
y once, so memory bandwidth limits it. A program (one thread block) keeps whole rows in registers:
about 4096 scores, or a single longer row. Input and output are fp16, bf16 or fp32, and sums are
fp32.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in Triton's own kernels)

from math import e, isfinite, log2
from typing import Any

import torch
import triton
import triton.language as tl
from quantbench.kernels.launching import (
    Plan,
    require_contiguous,
    require_like,
    require_support,
    result,
    short,
    step,
    widest,
)

from quantbench.errors import InputError, require_int
from quantbench.launch import Tile

# Callers may import this function from here too.
from quantbench.megatron import megatron_fused_available as megatron_fused_available
from quantbench.quantization import VECTOR_BYTES, WARP_THREADS, cdiv
from quantbench.workload.dtypes import dtype_name, missing_format

# Maximum number of rows. Row indices are 32-bit, and the last program may count up to 4096 rows
# past the end.
_MAX_ROWS = 2**31 - 4097

#: Maximum number of scores in a row. In fp32, such a row needs the largest block: 1024 threads,
#: each of which loads 64 bytes.
MAX_COLS = 16_384

_MAX_WARPS = 32  # maximum number of warps in a block
_MIN_BLOCK_COLS = 16  # a shorter row is padded to this number of columns
# Each thread has four 16-byte loads in flight. Full HBM bandwidth needs about 25 KB in flight per
# SM (Little's law on an H200: 4.8 TB/s · 0.7 µs / 132 SMs). More bytes per thread would take more
# registers, so fewer blocks would fit on an SM.
_BYTES_PER_THREAD = 4 * VECTOR_BYTES
# Minimum number of scores per program, including padding. In 16-bit formats, such a program reads
# and writes 16 KB in total. Smaller programs would finish faster than the GPU launches new ones.
_MIN_SCORES = 4096

#: Megatron-LM's value for masked scores (-10000) times log₂e, because the kernel uses exp2. If all
#: scores of a row are masked, the row's results are 1 / cols and not 0, as in the kernels of
#: Megatron-LM and apex (apex issue 1390).
MASKED_LOG2E = tl.constexpr(-10_000.0 * 1.4426950408889634)


@triton.jit
def softmax_forward(
    x,
    mask,
    y,
    rows_in_all,
    rows_per_head,
    rows_per_sample,
    mask_rows_per_sample,
    cols,
    scale_log2e,
    MASK: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Computes y = softmax(scale · x), ROWS rows per program. Grid: ceil(rows_in_all / ROWS).

    The time has cliffs (sudden steps) over cols. A thread reads 16 bytes at a time only if every
    row starts at a multiple of 16 bytes. With an odd number of columns, it reads one score at a
    time. In registers, a row is padded to the next power of two. This padding costs time only if
    the arithmetic takes longer than the memory traffic.
    With a causal mask, row q reads q + 1 scores, rounded up to whole vectors, and writes the whole
    row.

    x, y: contiguous [rows_in_all, cols], where rows_in_all = batch · heads · rows_per_head.
    mask: for MASK = "full", bytes [samples, rows_per_head, cols], where any value but 0 masks the
        score.
    rows_per_sample: heads · rows_per_head.
    mask_rows_per_sample: rows_per_head, or 0 if all samples share one mask.
    scale_log2e: scale · log₂e.
    MASK: "causal" (row q of a head masks the columns past q), "full" or "none".
    ALIGN: number of scores in one vector load, which divides cols.
    ROWS: rows per program.
    BLOCK_COLS: row length in registers, a power of two of at least cols.
    """
    first_row, rows, col, length = _tile(cols, ALIGN, ROWS, BLOCK_COLS)
    position = rows % rows_per_head
    readable, counts = _columns(position, col, length, MASK, ALIGN)
    inside = rows < rows_in_all
    at = first_row.to(tl.int64) * length + (rows - first_row) * length + col
    scores = tl.load(x + at, mask=inside & readable, other=0.0).to(tl.float32)
    if MASK == "full":
        mask_row = rows // rows_per_sample * mask_rows_per_sample + position
        masked = tl.load(
            mask + mask_row.to(tl.int64) * length + col, mask=inside & readable, other=0
        )
        scores = tl.where(masked != 0, MASKED_LOG2E, scores * scale_log2e)
        scores = tl.where(counts, scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    else:
        scores = tl.where(counts, scores, float("-inf"))
        # The maximum is subtracted before the scale is applied. The difference of 16-bit scores is
        # exact in fp32 if they are similar, so that large scores cost no accuracy.
        p = tl.exp2((scores - tl.max(scores, 1)[:, None]) * scale_log2e)
    p *= (1.0 / tl.sum(p, 1))[:, None]
    tl.store(y + at, p.to(y.dtype.element_ty), mask=inside & (col < length))


@triton.jit
def softmax_backward(
    dy,
    y,
    dx,
    rows_in_all,
    rows_per_head,
    cols,
    scale,
    MASK: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Computes dx = scale · y · (dy - Σ dy · y), with the sum in fp32.

    Masked elements have y = 0, so their dx is 0. With a causal mask, masked elements are not read.
    The grid and the other arguments are those of `softmax_forward`.

    dy: gradient of y.
    y: result of `softmax_forward`.
    dx: gradient of x, which is written.
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
    """Returns the program's first row, its rows [ROWS, 1], the columns [1, BLOCK_COLS], and cols.

    The form of cols shows the compiler that ALIGN divides it.
    """
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)[:, None]
    return first_row, rows, tl.arange(0, BLOCK_COLS)[None, :], cols // ALIGN * ALIGN


@triton.jit
def _columns(position, col, length, MASK: tl.constexpr, ALIGN: tl.constexpr):
    """Returns a mask of the columns to load, and a mask of the columns that the softmax includes.

    Columns are loaded in whole vectors of ALIGN scores.

    position: index of each row within its head.
    col: indices of the columns.
    length: row length.
    """
    if MASK == "causal":
        readable = col < (position // ALIGN + 1) * ALIGN
        counts = col <= position
    else:
        readable = col < length
        counts = readable
    return readable, counts


def scaled_causal_softmax(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes softmax(scale · scores) with a causal mask.

    Row q uses columns 0 to q. The result is 0 in later columns. The result is differentiable.

    scores: [batch, heads, sq, sk], where sq equals sk.
    """
    return _Softmax.apply(scores, None, scale, True)


def scaled_masked_softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes softmax(scale · scores), with masked scores set to -10000.

    scores: [batch, heads, sq, sk].
    mask: boolean [batch, 1, sq, sk] or [1, 1, sq, sk], where True masks a score. A completely
        masked row gives 1 / sk everywhere.

    The result is differentiable.
    """
    return _Softmax.apply(scores, mask, scale, False)


def scaled_softmax(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes softmax(scale · scores) over the last dimension of scores[batch, heads, sq, sk].

    The result is differentiable.
    """
    return _Softmax.apply(scores, None, scale, False)


def plan_forward(
    scores: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> Plan:
    """Returns a plan that computes softmax(scale · scores).

    scores: [batch, heads, sq, sk].
    causal: whether the mask is causal.
    mask: as in `scaled_masked_softmax`; None for no mask.
    out: tensor for the result; None allocates it.
    tile: rows and columns per program; None for `softmax_tile`.

    Raises InputError for invalid tensors, and UnsupportedError for a dtype, GPU or Triton version
    without support.
    """
    who = "softmax"
    _check(who, "scores", scores, scale, causal)
    if causal and mask is not None:
        raise InputError(who, "causal = True with a mask", "one of the two")
    if mask is not None:
        samples = 1 if mask.shape[0] == 1 else scores.shape[0]
        require_like(who, "mask", mask, (samples, 1, *scores.shape[2:]), torch.bool, scores.device)
        require_contiguous(who, "mask", mask)
    out = result(who, "out", out, scores.shape, scores.dtype, scores.device)
    tile = tile or softmax_tile(scores.shape[-1], scores.element_size())
    given = forward_arguments(scores, mask, out, scale, causal, tile)
    return _plan(who, softmax_forward, given, out, tile)


def plan_backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> Plan:
    """Returns a plan that computes the gradient of scores, scale · y · (grad - Σ grad · y).

    grad: [batch, heads, sq, sk], gradient of y.
    y: [batch, heads, sq, sk], result of the forward plan.

    The other arguments and the errors are those of `plan_forward`.
    """
    who = "softmax backward"
    _check(who, "y", y, scale, causal)
    result(who, "grad", grad, y.shape, y.dtype, y.device)
    out = result(who, "out", out, y.shape, y.dtype, y.device)
    tile = tile or softmax_tile(y.shape[-1], y.element_size(), "backward")
    given = backward_arguments(grad, y, out, scale, causal, tile)
    return _plan(who, softmax_backward, given, out, tile)


class _Softmax(torch.autograd.Function):
    """Autograd function that saves only y, which suffices for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> torch.Tensor:
        y = _ran(plan_forward(scores, scale, causal=causal, mask=mask))
        ctx.save_for_backward(y)
        ctx.scale = scale
        ctx.causal = causal
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        # autograd may pass a gradient that is not contiguous, such as the expanded gradient of a
        # sum. Only such a gradient is copied.
        dx = _ran(plan_backward(grad.contiguous(), y, ctx.scale, causal=ctx.causal))
        return dx, None, None, None


def _ran(work: Plan) -> torch.Tensor:
    """Runs the plan once and returns its result."""
    work.run()
    return work.out


def _plan(who: str, kernel: Any, arguments: dict[str, Any], out: torch.Tensor, tile: Tile) -> Plan:
    """Returns the plan for one kernel.

    Raises InputError unless the tile's sides are powers of two and the tile holds a row.
    """
    cols = out.shape[-1]
    odd_sides = tile.block_n & (tile.block_n - 1) or tile.block_m & (tile.block_m - 1)
    if tile.block_n < cols or odd_sides:
        raise InputError(
            who, f"tile {tile}", f"powers of two, and a block_n of at least {cols} columns"
        )
    grid = cdiv(arguments["rows_in_all"], tile.block_m)
    return Plan((out,), (step(who, kernel, grid, arguments, out.device, tile),))


def forward_arguments(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    causal: bool,
    tile: Tile,
) -> dict[str, Any]:
    """Returns the arguments of `softmax_forward` by name, from those of `plan_forward`."""
    heads, sq = x.shape[1:3]
    kind = "causal" if causal else "none"
    dropped = None
    mask_rows = 0
    if mask is not None:
        kind = "full"
        dropped = mask.view(torch.uint8)
        if mask.shape[0] > 1:
            mask_rows = sq
    return {
        "x": x,
        "mask": dropped,
        "y": out,
        "rows_per_sample": heads * sq,
        "mask_rows_per_sample": mask_rows,
        "scale_log2e": scale * log2(e),
    } | _shared_arguments(x, kind, tile)


def backward_arguments(
    grad: torch.Tensor, y: torch.Tensor, out: torch.Tensor, scale: float, causal: bool, tile: Tile
) -> dict[str, Any]:
    """Returns the arguments of `softmax_backward` by name, from those of `plan_backward`."""
    shared = _shared_arguments(y, "causal" if causal else "none", tile)
    return {"dy": grad, "y": y, "dx": out, "scale": float(scale)} | shared


def _shared_arguments(x: torch.Tensor, mask: str, tile: Tile) -> dict[str, Any]:
    """Returns the arguments that the forward and backward kernels share, by name.

    mask: value of the kernels' argument MASK.
    """
    cols = x.shape[-1]
    return {
        "rows_in_all": x.numel() // cols,
        "rows_per_head": x.shape[-2],
        "cols": cols,
        "MASK": mask,
        "ALIGN": widest(VECTOR_BYTES // x.element_size(), cols),
        "ROWS": tile.block_m,
        "BLOCK_COLS": tile.block_n,
        "num_warps": tile.num_warps or 4,
        "num_stages": 1,
    }


def _check(who: str, name: str, x: torch.Tensor, scale: float, causal: bool) -> None:
    """Raises InputError or UnsupportedError for scores that the kernels do not support.

    who: name of the operation, for error messages.
    name: name of the tensor, for error messages.
    """
    shape = f"{name} of shape {tuple(x.shape)}"
    if x.dim() != 4 or 0 in x.shape:
        raise InputError(who, shape, "[batch, heads, sq, sk], each at least 1")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise InputError(who, f"{name} in {short(x.dtype)}", "float16, bfloat16 or float32")
    require_contiguous(who, name, x)
    if x.shape[-1] > MAX_COLS:
        raise InputError(who, shape, f"at most {MAX_COLS} columns, which a program holds at a time")
    if x.numel() // x.shape[-1] > _MAX_ROWS:
        raise InputError(who, shape, f"at most {_MAX_ROWS} rows in all")
    if causal and x.shape[-1] != x.shape[-2]:
        raise InputError(who, f"causal with {shape}", "sq equal to sk")
    if not isfinite(scale) or scale <= 0:
        raise InputError(who, f"scale = {scale!r}", "a finite number above 0")
    require_support(
        who, name, x, "", lambda capability: missing_format(dtype_name(x.dtype), capability)
    )


def softmax_tile(cols: int, element_bytes: int, direction: str = "forward") -> Tile:
    """Returns the tile of a softmax program.

    block_m is the number of rows, and block_n is the row length rounded up to a power of two. The
    number of warps follows from the bytes to load: backward loads two tensors, and forward loads
    one.

    cols: row length.
    element_bytes: bytes per score.
    direction: forward or backward.

    >>> softmax_tile(2048, 2)
    Tile(block_m=2, block_n=2048, block_k=None, split_k=1, stages=None, num_warps=4)
    """
    require_int("softmax", "cols", cols, high=MAX_COLS)
    block_cols = max(_MIN_BLOCK_COLS, 1 << (cols - 1).bit_length())
    loaded_bytes = element_bytes
    if direction == "backward":
        loaded_bytes *= 2
    rows = max(1, _MIN_SCORES // block_cols)
    threads = rows * block_cols * loaded_bytes // _BYTES_PER_THREAD
    return Tile(rows, block_cols, num_warps=min(_MAX_WARPS, threads // WARP_THREADS))
