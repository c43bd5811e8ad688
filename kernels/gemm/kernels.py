"""Defines the GEMM kernels: one way to compute a tile, and three ways to assign tiles to SMs.

c[m, n] = sum over k of a[m, k] · b[k, n], for each GEMM of a batch, summed in fp32. A program (one
thread block) computes a tile of BLOCK_M × BLOCK_N in steps of BLOCK_K along the reduction. A tile
that extends past m or n takes as long as a full tile (tile quantization). How tiles are assigned to
programs determines where the time jumps.

`lda`, `ldb` and `ldc` are leading dimensions in elements as in BLAS, row-major. A_TRANSPOSED means
that a is stored k × m, and B_TRANSPOSED that b is stored n × k. Operands are loaded by pointers on
any GPU, or by tensor descriptors on Hopper and newer, where the TMA unit copies whole boxes into
shared memory in the layout that wgmma reads.
"""

# ruff: noqa: N803, N806  (compile-time values are written in capitals, as in Triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def known_multiple(x, ALIGN: tl.constexpr):
    """Returns x, a multiple of ALIGN, in a form from which the compiler infers the multiple.

    By itself, Triton detects only arguments that are multiples of 16. Rows of a multiple of 8 fp16
    elements also allow 16-byte loads, but without this hint the compiler would use 2-byte loads.
    """
    return x // ALIGN * ALIGN


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Returns the row and column of the index-th tile, in an order that reuses the L2 cache.

    Tiles are taken GROUP_M rows at a time, column by column. The tiles of programs that run
    together then form a block of GROUP_M × (programs / GROUP_M) tiles. These programs read far
    fewer different rows of a and columns of b than the programs of one long row of tiles would.
    """
    tiles_in_group = GROUP_M * tiles_n
    first_m = index // tiles_in_group * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    within = index % tiles_in_group
    return first_m + within % rows, within // rows


@triton.jit
def accumulate(
    a,
    b,
    batch,
    tile_m,
    tile_n,
    first_step,
    last_step,
    m,
    n,
    k,
    lda,
    ldb,
    batch_stride_a,
    batch_stride_b,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the sum of a·b for one tile, BLOCK_M × BLOCK_N in fp32.

    The sum runs over the reduction steps [first_step, last_step).
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if DESCRIPTORS:
        # The TMA unit fills elements outside the matrix with zeros, so this path needs no masks and
        # no address arithmetic.
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        for step in range(first_step, last_step):
            at = step * BLOCK_K
            a_block = load_box(
                a,
                batch,
                row,
                at,
                TRANSPOSED=A_TRANSPOSED,
                BATCHED=BATCHED,
                ROWS=BLOCK_M,
                COLS=BLOCK_K,
            )
            b_block = load_box(
                b,
                batch,
                at,
                col,
                TRANSPOSED=B_TRANSPOSED,
                BATCHED=BATCHED,
                ROWS=BLOCK_K,
                COLS=BLOCK_N,
            )
            acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
    else:
        # A scalar pointer advances along the reduction. The offsets that a thread adds to this
        # pointer stay the same and fit 32 bits.
        lda = known_multiple(lda, ALIGN_A)
        ldb = known_multiple(ldb, ALIGN_B)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first = first_step * BLOCK_K
        ks = tl.arange(0, BLOCK_K)
        k_a = k
        k_b = k
        a += batch.to(tl.int64) * batch_stride_a
        b += batch.to(tl.int64) * batch_stride_b
        # Rows of a past m and columns of b past n are replaced by other rows and columns of the
        # same matrix, whose results are never stored. Only the reduction needs a mask, because
        # every element past k would change the sums.
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
def load_box(
    descriptor,
    batch,
    row,
    col,
    TRANSPOSED: tl.constexpr,
    BATCHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Returns ROWS × COLS elements of a matrix from (row, col) on.

    TRANSPOSED: whether the matrix is stored transposed.
    """
    if TRANSPOSED and BATCHED:
        box = descriptor.load([batch, col, row]).reshape(COLS, ROWS).T
    elif TRANSPOSED:
        box = descriptor.load([col, row]).T
    elif BATCHED:
        box = descriptor.load([batch, row, col]).reshape(ROWS, COLS)
    else:
        box = descriptor.load([row, col])
    return box


@triton.jit
def store_tile(
    c,
    acc,
    batch,
    tile_m,
    tile_n,
    m,
    n,
    ldc,
    batch_stride_c,
    ALIGN_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """Writes one tile of c.

    acc: values of the tile, BLOCK_M × BLOCK_N.
    SUBTILES: 2 writes the tile in two halves of BLOCK_N / 2 columns, which pass through half the
        shared memory. The other half holds another stage of the main loop.
    """
    if SUBTILES == 2:
        left, right = halves(acc)
        store_block(
            c,
            left,
            batch,
            tile_m * acc.shape[0],
            tile_n * acc.shape[1],
            m,
            n,
            ldc,
            batch_stride_c,
            ALIGN_C=ALIGN_C,
            DESCRIPTORS=DESCRIPTORS,
            BATCHED=BATCHED,
        )
        store_block(
            c,
            right,
            batch,
            tile_m * acc.shape[0],
            tile_n * acc.shape[1] + acc.shape[1] // 2,
            m,
            n,
            ldc,
            batch_stride_c,
            ALIGN_C=ALIGN_C,
            DESCRIPTORS=DESCRIPTORS,
            BATCHED=BATCHED,
        )
    else:
        store_block(
            c,
            acc,
            batch,
            tile_m * acc.shape[0],
            tile_n * acc.shape[1],
            m,
            n,
            ldc,
            batch_stride_c,
            ALIGN_C=ALIGN_C,
            DESCRIPTORS=DESCRIPTORS,
            BATCHED=BATCHED,
        )


@triton.jit
def store_block(
    c,
    values,
    batch,
    row,
    col,
    m,
    n,
    ldc,
    batch_stride_c,
    ALIGN_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
):
    """Writes the values that lie inside m × n, from (row, col) on."""
    if DESCRIPTORS:
        values = values.to(c.dtype)
        if BATCHED:
            c.store([batch, row, col], values.reshape(1, values.shape[0], values.shape[1]))
        else:
            c.store([row, col], values)
    else:
        n = known_multiple(n, ALIGN_C)
        ldc = known_multiple(ldc, ALIGN_C)
        rows = row + tl.arange(0, values.shape[0])
        cols = col + tl.arange(0, values.shape[1])
        start = c + batch.to(tl.int64) * batch_stride_c
        at = start + rows[:, None].to(tl.int64) * ldc + cols[None, :]
        tl.store(at, values.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def halves(x):
    """Returns the left and the right half of the columns of x. No data move between threads."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def gemm_data_parallel(
    a,
    b,
    c,
    batches,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_a,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    STORE_DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """Multiplies with one program per tile and part of the reduction.

    Grid: (tiles · batches, SPLIT_K), with SPLIT_K ≤ steps. The device holds sm_count ×
    blocks_per_sm programs at a time, which is a wave. The last wave takes as long as a full one,
    however few tiles it has (wave quantization).

    With SPLIT_K > 1, SPLIT_K programs share the reduction of each tile. The additional, shorter
    programs fill a device that m × n alone cannot fill. c is then fp32 of SPLIT_K · batches × m ×
    n, with one part after the other, and `gemm_add_parts` adds the parts.
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    batch = tl.program_id(0) // tiles
    tile_m, tile_n = tile_position(tl.program_id(0) % tiles, tiles_m, tiles_n, GROUP_M)
    # Every program has at least one step. If the compiler cannot infer this, ptxas serialises
    # Hopper's matrix instructions (C7515).
    steps = tl.maximum(tl.cdiv(k, BLOCK_K), 1)
    if SPLIT_K == 1:
        first_step = 0
        last_step = steps
        out = batch
    else:
        part = tl.program_id(1)
        first_step = part * steps // SPLIT_K
        last_step = tl.maximum((part + 1) * steps // SPLIT_K, first_step + 1)
        out = part * batches + batch
    acc = accumulate(
        a,
        b,
        batch,
        tile_m,
        tile_n,
        first_step,
        last_step,
        m,
        n,
        k,
        lda,
        ldb,
        batch_stride_a,
        batch_stride_b,
        A_TRANSPOSED=A_TRANSPOSED,
        B_TRANSPOSED=B_TRANSPOSED,
        ALIGN_A=ALIGN_A,
        ALIGN_B=ALIGN_B,
        DESCRIPTORS=LOAD_DESCRIPTORS,
        BATCHED=BATCHED,
        EVEN_K=EVEN_K,
        PRECISION=PRECISION,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    store_tile(
        c,
        acc,
        out,
        tile_m,
        tile_n,
        m,
        n,
        ldc,
        batch_stride_c,
        ALIGN_C=ALIGN_C,
        DESCRIPTORS=STORE_DESCRIPTORS,
        BATCHED=BATCHED,
        SUBTILES=SUBTILES,
    )


@triton.jit
def gemm_add_parts(
    parts,
    c,
    batches,
    m,
    n,
    ldc,
    batch_stride_c,
    ALIGN_C: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes c as the sum of the SPLIT_K fp32 parts.

    The order of the sum is fixed, so the result is the same in each run. Grid: blocks of BLOCK_M ×
    BLOCK_N elements, times batches.
    """
    blocks_n = tl.cdiv(n, BLOCK_N)
    blocks = tl.cdiv(m, BLOCK_M) * blocks_n
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    within = tl.program_id(0) % blocks
    rows = within // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ldc = known_multiple(ldc, ALIGN_C)
    row_length = known_multiple(n, ALIGN_C)
    inside = (rows[:, None] < m) & (cols[None, :] < row_length)
    at = rows[:, None].to(tl.int64) * row_length + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in range(SPLIT_K):
        start = (part * batches + batch) * m * row_length
        acc += tl.load(parts + start + at, mask=inside, other=0.0)
    out = c + batch * batch_stride_c + rows[:, None].to(tl.int64) * ldc + cols[None, :]
    tl.store(out, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def gemm_persistent(
    a,
    b,
    c,
    batches,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_a,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    STORE_DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Multiplies with P programs, one per block slot of the device.

    Program p computes tiles p, p + P, p + 2P, … Waves are quantized as with one program per tile,
    but programs start only once. On Hopper, the loads of the next tile run while a tile is written.

    FLATTEN: whether the loops over tiles and over steps are one loop. Its software pipeline does
        not drain between tiles: the first loads of a tile run while the previous tile is written.
    WARP_SPECIALIZE: whether loading, multiplying and writing have their own warps (Blackwell).
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(k, BLOCK_K)
    programs = tl.num_programs(0)
    if FLATTEN:
        # The loads run ahead, so the index of the tile to write is counted separately.
        written = tl.program_id(0) - programs
        for index in tl.range(
            tl.program_id(0),
            tiles * batches,
            programs,
            flatten=True,
            warp_specialize=WARP_SPECIALIZE,
        ):
            tile_m, tile_n = tile_position(index % tiles, tiles_m, tiles_n, GROUP_M)
            acc = accumulate(
                a,
                b,
                index // tiles,
                tile_m,
                tile_n,
                0,
                steps,
                m,
                n,
                k,
                lda,
                ldb,
                batch_stride_a,
                batch_stride_b,
                A_TRANSPOSED=A_TRANSPOSED,
                B_TRANSPOSED=B_TRANSPOSED,
                ALIGN_A=ALIGN_A,
                ALIGN_B=ALIGN_B,
                DESCRIPTORS=LOAD_DESCRIPTORS,
                BATCHED=BATCHED,
                EVEN_K=EVEN_K,
                PRECISION=PRECISION,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
            written += programs
            out_m, out_n = tile_position(written % tiles, tiles_m, tiles_n, GROUP_M)
            store_tile(
                c,
                acc,
                written // tiles,
                out_m,
                out_n,
                m,
                n,
                ldc,
                batch_stride_c,
                ALIGN_C=ALIGN_C,
                DESCRIPTORS=STORE_DESCRIPTORS,
                BATCHED=BATCHED,
                SUBTILES=SUBTILES,
            )
    else:
        for index in range(tl.program_id(0), tiles * batches, programs):
            tile_m, tile_n = tile_position(index % tiles, tiles_m, tiles_n, GROUP_M)
            acc = accumulate(
                a,
                b,
                index // tiles,
                tile_m,
                tile_n,
                0,
                steps,
                m,
                n,
                k,
                lda,
                ldb,
                batch_stride_a,
                batch_stride_b,
                A_TRANSPOSED=A_TRANSPOSED,
                B_TRANSPOSED=B_TRANSPOSED,
                ALIGN_A=ALIGN_A,
                ALIGN_B=ALIGN_B,
                DESCRIPTORS=LOAD_DESCRIPTORS,
                BATCHED=BATCHED,
                EVEN_K=EVEN_K,
                PRECISION=PRECISION,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
            store_tile(
                c,
                acc,
                index // tiles,
                tile_m,
                tile_n,
                m,
                n,
                ldc,
                batch_stride_c,
                ALIGN_C=ALIGN_C,
                DESCRIPTORS=STORE_DESCRIPTORS,
                BATCHED=BATCHED,
                SUBTILES=SUBTILES,
            )


@triton.jit(do_not_specialize=["streamed_tiles"])
def gemm_stream_k(
    a,
    b,
    c,
    partials,
    ready,
    streamed_tiles,
    batches,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_a,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    STORE_DESCRIPTORS: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """Multiplies with P programs, one per block slot of the device.

    Programs divide the reduction steps of the first `streamed_tiles` tiles evenly, and then compute
    whole tiles (Osama et al., "Stream-K", PPoPP 2023). This removes the cliff of a partial wave, at
    the cost of partial tiles that one program writes and another adds up.

    The reduction steps of the streamed tiles are cut into P consecutive ranges, and program p
    computes range p. The owner of a tile is the program that computes the tile's first reduction
    step. A program whose range begins inside a tile writes the partial sum of this tile to the
    program's slot of `partials` (P × BLOCK_M × BLOCK_N, fp32), and sets the program's flag in
    `ready`. The tile is the first in the range of this program but the last in the range of the
    owner, so the owner rarely waits. The owner adds the slots of the following programs in the
    order of p, so results do not change from run to run.

    The remaining tiles are computed whole, an equal number by every program, as in
    `gemm_persistent`.

    A program may wait only for programs that run. The caller ensures that all programs of a grid
    are resident at a time. In addition, an owner waits only for programs that started before the
    owner, because p counts down from the end of the grid.
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(k, BLOCK_K)
    programs = tl.num_programs(0)
    p = programs - 1 - tl.program_id(0)

    streamed_steps = streamed_tiles * steps
    begin = _share_begin(p, streamed_steps, programs)
    end = _share_begin(p + 1, streamed_steps, programs)
    while begin < end:
        index = begin // steps
        first_step = begin - index * steps
        last_step = min(steps, end - index * steps)
        batch = index // tiles
        tile_m, tile_n = tile_position(index % tiles, tiles_m, tiles_n, GROUP_M)
        acc = accumulate(
            a,
            b,
            batch,
            tile_m,
            tile_n,
            first_step,
            last_step,
            m,
            n,
            k,
            lda,
            ldb,
            batch_stride_a,
            batch_stride_b,
            A_TRANSPOSED=A_TRANSPOSED,
            B_TRANSPOSED=B_TRANSPOSED,
            ALIGN_A=ALIGN_A,
            ALIGN_B=ALIGN_B,
            DESCRIPTORS=LOAD_DESCRIPTORS,
            BATCHED=BATCHED,
            EVEN_K=EVEN_K,
            PRECISION=PRECISION,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
        if first_step > 0:
            _store_partial(partials, p, acc)
            tl.debug_barrier()  # the whole slot is written before one thread sets the flag
            tl.atomic_xchg(ready + p, 1, sem="release")
        else:
            last = p
            covered = last_step
            while covered < steps:
                last += 1
                while tl.atomic_cas(ready + last, 1, 0, sem="acquire") == 0:
                    pass  # taking the flag also clears it for the next launch
                covered = _share_begin(last + 1, streamed_steps, programs) - index * steps
            tl.debug_barrier()  # no thread reads a slot before the one that saw its flag
            # Half a tile at a time goes straight into c, because two whole tiles do not fit into
            # registers.
            left, right = halves(acc)
            for other in range(p + 1, last + 1):
                left += tl.load(_slot(partials, other, 0, BLOCK_M, BLOCK_N), cache_modifier=".cg")
            store_block(
                c,
                left,
                batch,
                tile_m * BLOCK_M,
                tile_n * BLOCK_N,
                m,
                n,
                ldc,
                batch_stride_c,
                ALIGN_C=ALIGN_C,
                DESCRIPTORS=STORE_DESCRIPTORS,
                BATCHED=BATCHED,
            )
            for other in range(p + 1, last + 1):
                right += tl.load(_slot(partials, other, 1, BLOCK_M, BLOCK_N), cache_modifier=".cg")
            store_block(
                c,
                right,
                batch,
                tile_m * BLOCK_M,
                tile_n * BLOCK_N + BLOCK_N // 2,
                m,
                n,
                ldc,
                batch_stride_c,
                ALIGN_C=ALIGN_C,
                DESCRIPTORS=STORE_DESCRIPTORS,
                BATCHED=BATCHED,
            )
        begin = index * steps + last_step

    for index in range(streamed_tiles + p, tiles * batches, programs):
        batch = index // tiles
        tile_m, tile_n = tile_position(index % tiles, tiles_m, tiles_n, GROUP_M)
        acc = accumulate(
            a,
            b,
            batch,
            tile_m,
            tile_n,
            0,
            steps,
            m,
            n,
            k,
            lda,
            ldb,
            batch_stride_a,
            batch_stride_b,
            A_TRANSPOSED=A_TRANSPOSED,
            B_TRANSPOSED=B_TRANSPOSED,
            ALIGN_A=ALIGN_A,
            ALIGN_B=ALIGN_B,
            DESCRIPTORS=LOAD_DESCRIPTORS,
            BATCHED=BATCHED,
            EVEN_K=EVEN_K,
            PRECISION=PRECISION,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
        store_tile(
            c,
            acc,
            batch,
            tile_m,
            tile_n,
            m,
            n,
            ldc,
            batch_stride_c,
            ALIGN_C=ALIGN_C,
            DESCRIPTORS=STORE_DESCRIPTORS,
            BATCHED=BATCHED,
            SUBTILES=SUBTILES,
        )


@triton.jit
def _share_begin(p, steps, programs):
    """Returns the first step of program p's range of the streamed steps.

    The ranges differ by at most one step, and the longer ranges come first.
    """
    return p * (steps // programs) + min(p, steps % programs)


@triton.jit
def _slot(partials, p, half, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns pointers to one half of program p's partial tile, BLOCK_M × BLOCK_N / 2."""
    WIDTH: tl.constexpr = BLOCK_N // 2
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, WIDTH)
    return partials + (2 * p + half) * (BLOCK_M * WIDTH) + rows[:, None] * WIDTH + cols[None, :]


@triton.jit
def _store_partial(partials, p, acc):
    """Writes a partial tile to program p's slot.

    The store bypasses the L1 cache, which the reader does not share.
    """
    left, right = halves(acc)
    tl.store(_slot(partials, p, 0, acc.shape[0], acc.shape[1]), left, cache_modifier=".cg")
    tl.store(_slot(partials, p, 1, acc.shape[0], acc.shape[1]), right, cache_modifier=".cg")
