"""Computes o = softmax(q·kᵀ · scale)·v without writing the seq_q × seq_k matrix to memory.

A program (one thread block) keeps BLOCK_M rows of one head and walks over k and v in blocks of
BLOCK_N rows. For each block it computes s = q·kᵀ (BLOCK_M × BLOCK_N), turns it into p = exp(s - m)
with the running row maximum m, and adds p·v to the output and Σp to the row sum l. Earlier sums are
scaled down when the maximum rises (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018; Dao, "FlashAttention-2", 2023).

Exponentials have base 2, which takes one instruction each, with log₂e folded into the scale.
"""

# ruff: noqa: N803, N806, E741  (compile-time parameters are written in capitals, as in Triton's
# own kernels; l is the row sum of the papers)

import triton
import triton.language as tl
from quantbench.kernels.attention.tile import (
    drop,
    head_offset,
    load_rows,
    multiply_transposed,
    store_rows,
)


@triton.jit
def attention_forward(
    q,
    k,
    v,
    q_tail,
    k_tail,
    v_tail,
    o,
    lse,
    q_batch_stride,
    q_head_stride,
    k_batch_stride,
    k_head_stride,
    v_batch_stride,
    v_head_stride,
    o_batch_stride,
    o_head_stride,
    all_heads,
    heads,
    kv_group,
    side_by_side,
    seq_q,
    seq_k,
    scale_log2e,
    Q_ROW_STRIDE: tl.constexpr,
    K_ROW_STRIDE: tl.constexpr,
    V_ROW_STRIDE: tl.constexpr,
    O_ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes o and lse, BLOCK_M rows of one head per program.

    Grid: ceil(seq_q / BLOCK_M) · all_heads. seq_q is rounded up to BLOCK_M, seq_k to BLOCK_N, and
    head_dim to MAIN + TAIL columns (see tile.py). Only blocks that the diagonal or the end of the
    keys cuts (EDGE) compare each element with its bound.

    Programs run in waves of SMs × blocks per SM. With a causal mask, the last row block attends to
    all keys, and the first only to its own. The longest programs therefore start first, and short
    programs fill the last wave.

    q, o: [batch, heads, seq_q, head_dim].
    k, v: [batch, heads / kv_group, seq_k, head_dim].
    q_tail, k_tail, v_tail: descriptors of the TAIL columns of q, k and v if DESCRIPTORS is True;
        otherwise unused.
    lse: contiguous fp32 [batch, heads, seq_q], log₂ Σ exp of each row's scaled scores.
    *_stride: strides in elements. Batch and head strides are multiples of ALIGN. Descriptors need
        no strides.
    all_heads: batch · heads.
    side_by_side: number of heads whose programs run together, so that their k and v stay in L2.
    scale_log2e: scale · log₂e, because exponentials have base 2.
    MAIN, TAIL: numbers of columns of the two parts in which a row is held (see tile.py).
    EVEN_K: whether seq_k % BLOCK_N == 0.
    OVERLAP: whether to use `_overlapped`.
    """
    # Programs start in the order of their ids. The ids run through the groups of heads, and in each
    # group through the row blocks, last block first.
    row_blocks = tl.cdiv(seq_q, BLOCK_M)
    group = tl.program_id(0) // (side_by_side * row_blocks)
    within = tl.program_id(0) % (side_by_side * row_blocks)
    in_group = min(side_by_side, all_heads - group * side_by_side)
    batch_head = group * side_by_side + within % in_group
    first_row = (row_blocks - 1 - within // in_group) * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // kv_group
    if not DESCRIPTORS:
        q += head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
        k += head_offset(batch, kv_head, k_batch_stride, k_head_stride, ALIGN)
        v += head_offset(batch, kv_head, v_batch_stride, v_head_stride, ALIGN)

    q_rows, q_rest = load_rows(
        q,
        q_tail,
        batch,
        head,
        first_row,
        seq_q,
        ROW_STRIDE=Q_ROW_STRIDE,
        ROWS=BLOCK_M,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    rows = first_row + tl.arange(0, BLOCK_M)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, MAIN), tl.float32)
    # Without a tail, these are 16 columns that are not used, because a tensor cannot be empty.
    acc_rest = tl.zeros((BLOCK_M, TAIL if TAIL > 0 else 16), tl.float32)

    # Every row attends to all keys in [0, edge). The diagonal, or the end of the keys, cuts the
    # blocks in [edge, end).
    if CAUSAL:
        edge = first_row // BLOCK_N * BLOCK_N
        end = min(first_row + BLOCK_M, seq_k)
    else:
        edge = seq_k // BLOCK_N * BLOCK_N
        end = seq_k
    if OVERLAP:
        acc, acc_rest, m, l = _overlapped(
            acc,
            acc_rest,
            m,
            l,
            q_rows,
            q_rest,
            rows,
            k,
            v,
            k_tail,
            v_tail,
            batch,
            kv_head,
            edge,
            end,
            seq_k,
            scale_log2e,
            K_ROW_STRIDE=K_ROW_STRIDE,
            V_ROW_STRIDE=V_ROW_STRIDE,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            CAUSAL=CAUSAL,
            PRECISION=PRECISION,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
        )
    else:
        # If the end of the keys cuts the last block, and pointers load it, this block comes first:
        # after the loop it makes ptxas serialise all matrix instructions on Hopper (C7515). With
        # descriptors a first block would take additional shared memory, so this block stays last.
        if not CAUSAL and not EVEN_K and not DESCRIPTORS:
            acc, acc_rest, m, l = _block(
                acc,
                acc_rest,
                m,
                l,
                q_rows,
                q_rest,
                rows,
                k,
                v,
                k_tail,
                v_tail,
                batch,
                kv_head,
                edge,
                seq_k,
                scale_log2e,
                K_ROW_STRIDE=K_ROW_STRIDE,
                V_ROW_STRIDE=V_ROW_STRIDE,
                MAIN=MAIN,
                TAIL=TAIL,
                HEAD_DIM=HEAD_DIM,
                DESCRIPTORS=DESCRIPTORS,
                CAUSAL=CAUSAL,
                PRECISION=PRECISION,
                EDGE=True,
                BLOCK_N=BLOCK_N,
            )
        for n in range(0, edge, BLOCK_N):
            acc, acc_rest, m, l = _block(
                acc,
                acc_rest,
                m,
                l,
                q_rows,
                q_rest,
                rows,
                k,
                v,
                k_tail,
                v_tail,
                batch,
                kv_head,
                n,
                seq_k,
                scale_log2e,
                K_ROW_STRIDE=K_ROW_STRIDE,
                V_ROW_STRIDE=V_ROW_STRIDE,
                MAIN=MAIN,
                TAIL=TAIL,
                HEAD_DIM=HEAD_DIM,
                DESCRIPTORS=DESCRIPTORS,
                CAUSAL=CAUSAL,
                PRECISION=PRECISION,
                EDGE=False,
                BLOCK_N=BLOCK_N,
            )
        if CAUSAL or (not EVEN_K and DESCRIPTORS):
            for n in range(edge, end, BLOCK_N):
                acc, acc_rest, m, l = _block(
                    acc,
                    acc_rest,
                    m,
                    l,
                    q_rows,
                    q_rest,
                    rows,
                    k,
                    v,
                    k_tail,
                    v_tail,
                    batch,
                    kv_head,
                    n,
                    seq_k,
                    scale_log2e,
                    K_ROW_STRIDE=K_ROW_STRIDE,
                    V_ROW_STRIDE=V_ROW_STRIDE,
                    MAIN=MAIN,
                    TAIL=TAIL,
                    HEAD_DIM=HEAD_DIM,
                    DESCRIPTORS=DESCRIPTORS,
                    CAUSAL=CAUSAL,
                    PRECISION=PRECISION,
                    EDGE=True,
                    BLOCK_N=BLOCK_N,
                )

    inverse = 1.0 / l
    o += head_offset(batch, head, o_batch_stride, o_head_stride, ALIGN)
    store_rows(
        o,
        acc * inverse[:, None],
        acc_rest * inverse[:, None],
        first_row,
        seq_q,
        ROW_STRIDE=O_ROW_STRIDE,
        HEAD_DIM=HEAD_DIM,
    )
    tl.store(
        lse + batch_head.to(tl.int64) * seq_q + rows,
        m * scale_log2e + tl.log2(l),
        mask=rows < seq_q,
    )


@triton.jit
def _block(
    acc,
    acc_rest,
    m,
    l,
    q,
    q_rest,
    rows,
    k,
    v,
    k_tail,
    v_tail,
    batch,
    kv_head,
    n,
    seq_k,
    scale_log2e,
    K_ROW_STRIDE: tl.constexpr,
    V_ROW_STRIDE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the block of k and v from row n on to the running output, maximum and row sum.

    EDGE: whether the diagonal or the end of the keys cuts the block, so that scores must be masked.
    """
    k_rows, k_rest = load_rows(
        k,
        k_tail,
        batch,
        kv_head,
        n,
        seq_k,
        ROW_STRIDE=K_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=EDGE,
    )
    s = multiply_transposed(q, q_rest, k_rows, k_rest, TAIL, PRECISION)
    if EDGE:
        s = drop(s, rows, n, seq_k, CAUSAL)
    p, shrink, m, l = _softmax(s, m, l, scale_log2e)
    acc *= shrink[:, None]
    acc_rest *= shrink[:, None]
    v_rows, v_rest = load_rows(
        v,
        v_tail,
        batch,
        kv_head,
        n,
        seq_k,
        ROW_STRIDE=V_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=EDGE,
    )
    acc, acc_rest = _add_product(acc, acc_rest, p.to(v_rows.dtype), v_rows, v_rest, TAIL, PRECISION)
    return acc, acc_rest, m, l


@triton.jit
def _overlapped(
    acc,
    acc_rest,
    m,
    l,
    q,
    q_rest,
    rows,
    k,
    v,
    k_tail,
    v_tail,
    batch,
    kv_head,
    edge,
    end,
    seq_k,
    scale_log2e,
    K_ROW_STRIDE: tl.constexpr,
    V_ROW_STRIDE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Processes all blocks, with the softmax of each block beside the next block's q·kᵀ.

    On Hopper, q·kᵀ and p·v of a block together take about twice as long as its exponentials.
    Without overlap, the tensor cores idle during the exponentials; here they compute the next
    block's s meanwhile (Shah et al., "FlashAttention-3", 2024, section 3.2). The blocks from `edge`
    on come first, and then the blocks in [0, edge).

    At the start of an iteration, p belongs to the previous block, whose p·v is still to be added,
    and s belongs to the current block. The iteration adds p·v, starts the next block's s, and then
    computes the current block's softmax. Four conditions let the compiler keep the tensor cores
    busy during the softmax. If one condition fails, the tensor cores wait for the softmax (Triton's
    WGMMAPipeline rules; ptxas says C7514):
    - p·v is used within the iteration, so the iteration waits for it and for the current s, which
      the previous iteration started;
    - only the next iteration uses the next s;
    - p crosses iterations as plain bits, because a 16-bit float would move to shared memory first;
    - s is read for the last time before the next s starts (x = s - m), so that both can have the
      same registers.
    """
    # The diagonal of BLOCK_M rows cuts EDGE_BLOCKS blocks of k and v.
    if CAUSAL:
        EDGE_BLOCKS: tl.constexpr = BLOCK_M // BLOCK_N if BLOCK_M > BLOCK_N else 1
    else:
        EDGE_BLOCKS: tl.constexpr = 1
        edge = (end - 1) // BLOCK_N * BLOCK_N  # start of the last block, whether cut or not
    last = edge + (EDGE_BLOCKS - 1) * BLOCK_N
    for i in tl.static_range(EDGE_BLOCKS):
        n = edge + i * BLOCK_N
        k_rows, k_rest = load_rows(
            k,
            k_tail,
            batch,
            kv_head,
            n,
            seq_k,
            ROW_STRIDE=K_ROW_STRIDE,
            ROWS=BLOCK_N,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            BOUNDED=True,
        )
        s = multiply_transposed(q, q_rest, k_rows, k_rest, TAIL, PRECISION)
        s = drop(s, rows, n, seq_k, CAUSAL)
        p, shrink, m, l = _softmax(s, m, l, scale_log2e)
        acc *= shrink[:, None]
        acc_rest *= shrink[:, None]
        if i < EDGE_BLOCKS - 1:
            v_rows, v_rest = load_rows(
                v,
                v_tail,
                batch,
                kv_head,
                n,
                seq_k,
                ROW_STRIDE=V_ROW_STRIDE,
                ROWS=BLOCK_N,
                MAIN=MAIN,
                TAIL=TAIL,
                HEAD_DIM=HEAD_DIM,
                DESCRIPTORS=DESCRIPTORS,
                BOUNDED=True,
            )
            acc, acc_rest = _add_product(
                acc, acc_rest, p.to(q.dtype), v_rows, v_rest, TAIL, PRECISION
            )
        else:
            bits = p.to(q.dtype).to(tl.int16, bitcast=True)
    k_rows, k_rest = load_rows(
        k,
        k_tail,
        batch,
        kv_head,
        0,
        seq_k,
        ROW_STRIDE=K_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=False,
    )
    s = multiply_transposed(q, q_rest, k_rows, k_rest, TAIL, PRECISION)
    for n in range(0, edge - BLOCK_N, BLOCK_N):
        before = tl.where(n == 0, last, n - BLOCK_N)
        v_rows, v_rest = load_rows(
            v,
            v_tail,
            batch,
            kv_head,
            before,
            seq_k,
            ROW_STRIDE=V_ROW_STRIDE,
            ROWS=BLOCK_N,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            BOUNDED=True,
        )
        acc, acc_rest = _add_product(
            acc, acc_rest, bits.to(q.dtype, bitcast=True), v_rows, v_rest, TAIL, PRECISION
        )
        x = s - m[:, None]
        k_rows, k_rest = load_rows(
            k,
            k_tail,
            batch,
            kv_head,
            n + BLOCK_N,
            seq_k,
            ROW_STRIDE=K_ROW_STRIDE,
            ROWS=BLOCK_N,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            BOUNDED=False,
        )
        s = multiply_transposed(q, q_rest, k_rows, k_rest, TAIL, PRECISION)
        p, shrink, m, l = _softmax_of_difference(x, m, l, scale_log2e)
        acc *= shrink[:, None]
        acc_rest *= shrink[:, None]
        bits = p.to(q.dtype).to(tl.int16, bitcast=True)
    # What remains is p·v of the block before the last whole block, and then the last whole block.
    # In the first row block there is no whole block. Block 0 then stands in for the last whole
    # block, with weight 0, because a branch here would cost the overlap above.
    before = tl.where(edge > BLOCK_N, edge - 2 * BLOCK_N, last)
    v_rows, v_rest = load_rows(
        v,
        v_tail,
        batch,
        kv_head,
        before,
        seq_k,
        ROW_STRIDE=V_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    acc, acc_rest = _add_product(
        acc, acc_rest, bits.to(q.dtype, bitcast=True), v_rows, v_rest, TAIL, PRECISION
    )
    x = tl.where(edge > 0, s - m[:, None], float("-inf"))
    p, shrink, m, l = _softmax_of_difference(x, m, l, scale_log2e)
    acc *= shrink[:, None]
    acc_rest *= shrink[:, None]
    v_rows, v_rest = load_rows(
        v,
        v_tail,
        batch,
        kv_head,
        tl.maximum(edge - BLOCK_N, 0),
        seq_k,
        ROW_STRIDE=V_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    acc, acc_rest = _add_product(acc, acc_rest, p.to(q.dtype), v_rows, v_rest, TAIL, PRECISION)
    return acc, acc_rest, m, l


@triton.jit
def _softmax(s, m, l, scale_log2e):
    """Adds the scores of one block to the running softmax.

    Returns p, the factor for the earlier sum and output, the new maximum and the new sum.

    s: scores of one block, without the scale (rows, columns).
    m, l: maximum and sum of the earlier blocks (rows,).
    """
    higher = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s * scale_log2e - (higher * scale_log2e)[:, None])
    shrink = tl.exp2((m - higher) * scale_log2e)
    return p, shrink, higher, l * shrink + tl.sum(p, 1)


@triton.jit
def _softmax_of_difference(x, m, l, scale_log2e):
    """Computes the same as `_softmax` from x = s - m."""
    rise = tl.maximum(tl.max(x, 1), 0.0)
    p = tl.exp2(x * scale_log2e - (rise * scale_log2e)[:, None])
    shrink = tl.exp2(-rise * scale_log2e)
    return p, shrink, m + rise, l * shrink + tl.sum(p, 1)


@triton.jit
def _add_product(acc, acc_rest, p, v, v_rest, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """Returns acc + p·v for both parts of head_dim."""
    acc = tl.dot(p, v, acc, input_precision=PRECISION)
    if TAIL > 0:
        acc_rest = tl.dot(p, v_rest, acc_rest, input_precision=PRECISION)
    return acc, acc_rest
