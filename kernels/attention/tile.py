"""Loads, stores, multiplies and masks blocks of rows of any head_dim, for the attention kernels.

Triton's tensors have power-of-two sizes, but head_dim need not be one. A row is therefore held in
two parts, MAIN and TAIL columns: 96 = 64 + 32, 72 = 64 + 8 (held in 16, the smallest side that
tl.dot accepts). Columns past head_dim are zeros that cost as much as other columns, which is
tile quantization in head_dim.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in Triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def head_offset(batch, head, batch_stride, head_stride, ALIGN: tl.constexpr):
    """Returns the offset of one head of one sample in elements, which is a multiple of ALIGN.

    The rounding to ALIGN changes no value. It lets the compiler infer the alignment.
    """
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
    """Returns ROWS rows of one head from `row` on, as (ROWS × MAIN) and (ROWS × TAIL) elements.

    The second result is unused if TAIL is 0. Tensor descriptors (Hopper and newer) need rows that
    start at multiples of 16 bytes. Pointers take any strides, but a thread then loads at most as
    many elements at a time as the largest power of two that divides every stride and head_dim. A
    misaligned head_dim is a cliff for this reason: in 16-bit formats, a head_dim of 108 or 100
    allows loads of 8 bytes, and a head_dim of 150 allows loads of 4 bytes.

    source, tail: descriptors of [batch, head, row, head_dim] with boxes of MAIN and TAIL columns.
        Without DESCRIPTORS, source is a pointer to the first element of the head.
    ROW_STRIDE: distance between rows in elements. With a constant stride, a thread keeps one
        address register; with a variable stride it would keep one for each load.
    BOUNDED: whether rows from `rows_end` on are read as zeros. Descriptors always read these rows
        as zeros.
    """
    if DESCRIPTORS:
        main = source.load([batch, head, row, 0]).reshape(ROWS, MAIN)
        rest = main
        if TAIL > 0:
            rest = tail.load([batch, head, row, MAIN]).reshape(ROWS, TAIL)
    else:
        # The offset of the block's first row has 64 bits, and offsets within the block have 32.
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
    """Returns ROWS × WIDTH elements from column FIRST on, with zeros past HEAD_DIM."""
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
    """Writes `main` (rows × MAIN) and `rest` (rows × TAIL) to one head, from `row` on.

    Rows from `rows_end` on and columns past HEAD_DIM are not written.
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
    """Returns a · bᵀ over head_dim in fp32: rows of a × rows of b."""
    if TAIL > 0:
        # On Hopper a tl.dot runs asynchronously until its result is needed. The second tl.dot needs
        # the result of the first at once. The short part comes first, so that this wait is short.
        c = tl.dot(a_tail, b_tail.T, input_precision=PRECISION)
        c = tl.dot(a, b.T, c, input_precision=PRECISION)
    else:
        c = tl.dot(a, b.T, input_precision=PRECISION)
    return c


@triton.jit
def drop(s, rows, n, seq_k, CAUSAL: tl.constexpr):
    """Returns the scores s with -inf in the columns that do not count.

    These are the columns past the end of the keys and, with a causal mask, the keys after the
    query.

    rows: positions of the queries.
    n: position of the key of the first column of s.
    """
    cols = n + tl.arange(0, s.shape[1])
    counts = cols[None, :] < seq_k
    if CAUSAL:
        counts = counts & (cols[None, :] <= rows[:, None])
    return tl.where(counts, s, float("-inf"))
