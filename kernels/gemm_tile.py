"""One tile of a matrix product: where it lies, how its operands arrive, how its sum is written.

How operands arrive: by pointers on any GPU (cp.async into shared memory from sm_80 on), or by tensor descriptors on
Hopper and newer, where the TMA unit copies whole boxes into shared memory in the layout that wgmma reads.
"""

# ruff: noqa: N803, N806  (compile-time parameters are written in capitals, as in triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def known_multiple(x, ALIGN: tl.constexpr):
    """x, of which the caller knows that it is a multiple of ALIGN, written so that the compiler knows it too.

    By itself triton notices multiples of 16 elements and nothing below. A row length of 8 fp16 elements more or less
    still allows 16-byte loads, and without this it would get loads of 2 bytes.
    """
    return x // ALIGN * ALIGN


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the index-th tile, in the order that keeps the L2 cache warm.

    Tiles are taken GROUP_M rows at a time, column by column. The programs that run together then form a block of
    GROUP_M × (programs / GROUP_M) tiles, and read far fewer different rows of a and columns of b than one long row of
    tiles would.
    """
    tiles_in_group = GROUP_M * tiles_n
    first_m = index // tiles_in_group * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    within = index % tiles_in_group
    return first_m + within % rows, within // rows


@triton.jit
def accumulate(
    a, b, batch, tile_m, tile_n, first_step, last_step,
    m, n, k, lda, ldb, batch_stride_a, batch_stride_b,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BATCHED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum of a·b over the reduction steps [first_step, last_step) for one tile: BLOCK_M × BLOCK_N, fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if DESCRIPTORS:
        # The TMA unit fills what lies outside the matrix with zeros: no masks and no address arithmetic here.
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        for step in range(first_step, last_step):
            at = step * BLOCK_K
            a_block = _load_box(a, batch, row, at, A_TRANSPOSED, BATCHED, BLOCK_M, BLOCK_K)
            b_block = _load_box(b, batch, at, col, B_TRANSPOSED, BATCHED, BLOCK_K, BLOCK_N)
            acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
    else:
        # A scalar pointer walks along the reduction; what a thread adds to it stays the same and fits 32 bits.
        lda, ldb = known_multiple(lda, ALIGN_A), known_multiple(ldb, ALIGN_B)
        row, col, first = tile_m * BLOCK_M, tile_n * BLOCK_N, first_step * BLOCK_K
        ks = tl.arange(0, BLOCK_K)
        k_a, k_b = k, k
        a += batch.to(tl.int64) * batch_stride_a
        b += batch.to(tl.int64) * batch_stride_b
        # Rows of a and columns of b past the edge are replaced by others of the same matrix; what they yield is never
        # stored. Only the reduction needs a mask, since everything in it counts.
        if A_TRANSPOSED:
            rows = (row + tl.arange(0, BLOCK_M)) % known_multiple(m, ALIGN_A) - row
            a += row + lda.to(tl.int64) * first
            a_offsets = rows[:, None] + ks[None, :] * lda
            a_step = BLOCK_K * lda
        else:
            k_a = known_multiple(k, ALIGN_A)
            rows = tl.minimum(tl.arange(0, BLOCK_M), m - 1 - row)
            a += row.to(tl.int64) * lda + first
            a_offsets = rows[:, None] * lda + ks[None, :]
            a_step = BLOCK_K
        if B_TRANSPOSED:
            k_b = known_multiple(k, ALIGN_B)
            cols = tl.minimum(tl.arange(0, BLOCK_N), n - 1 - col)
            b += col.to(tl.int64) * ldb + first
            b_offsets = ks[:, None] + cols[None, :] * ldb
            b_step = BLOCK_K
        else:
            cols = (col + tl.arange(0, BLOCK_N)) % known_multiple(n, ALIGN_B) - col
            b += col + ldb.to(tl.int64) * first
            b_offsets = ks[:, None] * ldb + cols[None, :]
            b_step = BLOCK_K * ldb
        for step in range(first_step, last_step):
            if EVEN_K:
                a_block = tl.load(a + a_offsets)
                b_block = tl.load(b + b_offsets)
            else:
                a_block = tl.load(a + a_offsets, mask=ks[None, :] < k_a - step * BLOCK_K, other=0.0)
                b_block = tl.load(b + b_offsets, mask=ks[:, None] < k_b - step * BLOCK_K, other=0.0)
            acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
            a += a_step
            b += b_step
    return acc


@triton.jit
def _load_box(
    descriptor, batch, row, col,
    TRANSPOSED: tl.constexpr, BATCHED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS × COLS elements of a matrix from (row, col) on, which may be stored transposed."""
    if TRANSPOSED:
        box = descriptor.load([batch, col, row]).reshape(COLS, ROWS) if BATCHED else descriptor.load([col, row])
        box = box.T
    else:
        box = descriptor.load([batch, row, col]).reshape(ROWS, COLS) if BATCHED else descriptor.load([row, col])
    return box


@triton.jit
def store_tile(
    c, acc, batch, tile_m, tile_n, m, n, ldc, batch_stride_c,
    ALIGN_C: tl.constexpr, DESCRIPTORS: tl.constexpr, BATCHED: tl.constexpr, SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write one tile of c. SUBTILES = 2 writes it in two halves of BLOCK_N / 2 columns, through half the shared
    memory: what is left over holds another stage of the main loop."""
    if SUBTILES == 2:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        HALF: tl.constexpr = BLOCK_N // 2
        store_block(c, left, batch, tile_m * BLOCK_M, tile_n * BLOCK_N, m, n, ldc, batch_stride_c,
                    ALIGN_C, DESCRIPTORS, BATCHED, BLOCK_M, HALF)  # fmt: skip
        store_block(c, right, batch, tile_m * BLOCK_M, tile_n * BLOCK_N + HALF, m, n, ldc, batch_stride_c,
                    ALIGN_C, DESCRIPTORS, BATCHED, BLOCK_M, HALF)  # fmt: skip
    else:
        store_block(c, acc, batch, tile_m * BLOCK_M, tile_n * BLOCK_N, m, n, ldc, batch_stride_c,
                    ALIGN_C, DESCRIPTORS, BATCHED, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def store_block(
    c, values, batch, row, col, m, n, ldc, batch_stride_c,
    ALIGN_C: tl.constexpr, DESCRIPTORS: tl.constexpr, BATCHED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write ROWS × COLS values from (row, col) on, as far as they lie inside m × n."""
    if DESCRIPTORS:
        if BATCHED:
            c.store([batch, row, col], values.to(c.dtype).reshape(1, ROWS, COLS))
        else:
            c.store([row, col], values.to(c.dtype))
    else:
        n, ldc = known_multiple(n, ALIGN_C), known_multiple(ldc, ALIGN_C)
        rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        at = c + batch.to(tl.int64) * batch_stride_c + rows[:, None].to(tl.int64) * ldc + cols[None, :]
        tl.store(at, values.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of the columns of a ROWS × COLS block, without moving data between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))
