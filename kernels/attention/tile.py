"""Loads and stores blocks of rows of q, k and v of any head_dim, for the attention kernels.

Triton's tensors have power-of-two sizes, head_dim need not. A row is held in two parts, MAIN and
TAIL columns, the first a power of two and the second a power of two or 0: 96 = 64 + 32, 72 = 64 + 8
(held in 16, the least of a matrix instruction). Columns past head_dim are zeros that cost as much
as the others: *tile quantization* in head_dim.

Tensor descriptors (Hopper and newer) need rows that start at multiples of 16 bytes. Pointers take
any strides; the widest load is the largest power of two that divides every stride and head_dim.
This is the cliff of a misaligned head_dim: 108 and 100 load 8 bytes at a time, 150 loads 4.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def head_offset(batch, head, batch_stride, head_stride, ALIGN: tl.constexpr):
    """Returns the offset of one head of one sample, elements, a multiple of ALIGN."""
    return (batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride) // ALIGN * ALIGN


@triton.jit
def load_rows(
    source,
    tail,
    batch,
    head,
    row,
    rows_end,
    ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Loads ROWS rows of one head from `row` on, as (ROWS × MAIN, ROWS × TAIL); the second is
    unused when TAIL is 0.

    source, tail: descriptors of [batch, head, row, head_dim] with boxes of MAIN and TAIL columns;
        or source is a pointer to the head's first element.
    ROW_STRIDE: elements; being constant, it leaves one address register per thread where each load
        would have its own.
    BOUNDED: rows from `rows_end` on are read as zeros (descriptors do so in any case).
    """
    if DESCRIPTORS:
        main = source.load([batch, head, row, 0]).reshape(ROWS, MAIN)
        rest = main
        if TAIL > 0:
            rest = tail.load([batch, head, row, MAIN]).reshape(ROWS, TAIL)
    else:
        # 64 bits up to the block's first row, 32 within the block.
        first = source + row * tl.full((), ROW_STRIDE, tl.int64)
        main = _load_part(
            first,
            rows_end - row,
            ROW_STRIDE=ROW_STRIDE,
            FIRST=0,
            ROWS=ROWS,
            WIDTH=MAIN,
            HEAD_DIM=HEAD_DIM,
            BOUNDED=BOUNDED,
        )
        rest = main
        if TAIL > 0:
            rest = _load_part(
                first,
                rows_end - row,
                ROW_STRIDE=ROW_STRIDE,
                FIRST=MAIN,
                ROWS=ROWS,
                WIDTH=TAIL,
                HEAD_DIM=HEAD_DIM,
                BOUNDED=BOUNDED,
            )
    return main, rest


@triton.jit
def _load_part(
    first,
    rows_left,
    ROW_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Returns ROWS × WIDTH elements from column FIRST on, zeros past HEAD_DIM."""
    rows = tl.arange(0, ROWS)
    cols = FIRST + tl.arange(0, WIDTH)
    at = first + rows[:, None] * ROW_STRIDE + cols[None, :]
    if BOUNDED and FIRST + WIDTH > HEAD_DIM:
        part = tl.load(at, mask=(rows[:, None] < rows_left) & (cols[None, :] < HEAD_DIM), other=0.0)
    elif BOUNDED:
        part = tl.load(at, mask=rows[:, None] < rows_left, other=0.0)
    elif FIRST + WIDTH > HEAD_DIM:
        part = tl.load(at, mask=cols[None, :] < HEAD_DIM, other=0.0)
    else:
        part = tl.load(at)
    return part


@triton.jit
def store_rows(
    target,
    main,
    rest,
    row,
    rows_end,
    ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Writes main (rows × MAIN) and rest (rows × TAIL) to the rows of one head from `row` on, as
    far as they lie inside.
    """
    first = target + row * tl.full((), ROW_STRIDE, tl.int64)
    _store_part(first, main, rows_end - row, ROW_STRIDE=ROW_STRIDE, FIRST=0, HEAD_DIM=HEAD_DIM)
    if main.shape[1] < HEAD_DIM:
        _store_part(
            first,
            rest,
            rows_end - row,
            ROW_STRIDE=ROW_STRIDE,
            FIRST=main.shape[1],
            HEAD_DIM=HEAD_DIM,
        )


@triton.jit
def _store_part(
    first,
    values,
    rows_left,
    ROW_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Writes values (rows × columns) to the columns from FIRST on."""
    rows = tl.arange(0, values.shape[0])
    cols = FIRST + tl.arange(0, values.shape[1])
    at = first + rows[:, None] * ROW_STRIDE + cols[None, :]
    inside = rows[:, None] < rows_left
    if FIRST + values.shape[1] > HEAD_DIM:
        inside = inside & (cols[None, :] < HEAD_DIM)
    tl.store(at, values.to(first.dtype.element_ty), mask=inside)


@triton.jit
def multiply_transposed(a, a_tail, b, b_tail, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a · bᵀ over head_dim: rows of a × rows of b, fp32."""
    if TAIL > 0:
        # The short part first: on Hopper a product whose result is used at once waits for its end,
        # the one that is added to it does not.
        c = tl.dot(a_tail, b_tail.T, input_precision=PRECISION)
        c = tl.dot(a, b.T, c, input_precision=PRECISION)
    else:
        c = tl.dot(a, b.T, input_precision=PRECISION)
    return c


@triton.jit
def drop(s, rows, n, seq_k, CAUSAL: tl.constexpr):
    """Returns s with -inf for columns past the end of the keys, and past the row under a causal
    mask.
    """
    cols = n + tl.arange(0, s.shape[1])
    counts = cols[None, :] < seq_k
    if CAUSAL:
        counts = counts & (cols[None, :] <= rows[:, None])
    return tl.where(counts, s, float("-inf"))
