"""Computes the gradients of flash attention from q, k, v, o, do and the row statistics of forward.

With p = softmax(scale · q·kᵀ) the gradients are dv = pᵀ·do, dp = do·vᵀ, ds = p ∘ (dp - delta) with
delta = Σ do ∘ o per row, dq = scale · ds·k and dk = scale · dsᵀ·q. The kernels recompute p from q,
k and the stored log₂ of the row sums (Dao, "FlashAttention-2", 2023, section 2.2).
Separate kernels compute delta, then dk and dv, and then dq. No two programs add to the same
element, so results are the same in each run.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in Triton's own kernels)

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
def attention_delta(
    o,
    do,
    delta,
    o_batch_stride,
    o_head_stride,
    do_batch_stride,
    do_head_stride,
    heads,
    seq_q,
    O_ROW_STRIDE: tl.constexpr,
    DO_ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Computes delta[batch, head, row] = Σ o · do over head_dim in fp32.

    Grid: ceil(seq_q / BLOCK_M) · batch · heads.
    """
    row_blocks = tl.cdiv(seq_q, BLOCK_M)
    first_row = tl.program_id(0) % row_blocks * BLOCK_M
    batch_head = tl.program_id(0) // row_blocks
    batch = batch_head // heads
    head = batch_head % heads
    o += head_offset(batch, head, o_batch_stride, o_head_stride, ALIGN)
    do += head_offset(batch, head, do_batch_stride, do_head_stride, ALIGN)
    o_rows, o_rest = load_rows(
        o,
        None,
        batch,
        head,
        first_row,
        seq_q,
        ROW_STRIDE=O_ROW_STRIDE,
        ROWS=BLOCK_M,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=False,
        BOUNDED=True,
    )
    do_rows, do_rest = load_rows(
        do,
        None,
        batch,
        head,
        first_row,
        seq_q,
        ROW_STRIDE=DO_ROW_STRIDE,
        ROWS=BLOCK_M,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=False,
        BOUNDED=True,
    )
    total = tl.sum(o_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    if TAIL > 0:
        total += tl.sum(o_rest.to(tl.float32) * do_rest.to(tl.float32), 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    tl.store(delta + batch_head.to(tl.int64) * seq_q + rows, total, mask=rows < seq_q)


@triton.jit
def attention_backward_kv(
    q,
    k,
    v,
    do,
    q_tail,
    k_tail,
    v_tail,
    do_tail,
    dk,
    dv,
    lse,
    delta,
    q_batch_stride,
    q_head_stride,
    k_batch_stride,
    k_head_stride,
    v_batch_stride,
    v_head_stride,
    do_batch_stride,
    do_head_stride,
    kv_heads,
    kv_group,
    seq_q,
    seq_k,
    scale,
    scale_log2e,
    Q_ROW_STRIDE: tl.constexpr,
    K_ROW_STRIDE: tl.constexpr,
    V_ROW_STRIDE: tl.constexpr,
    DO_ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_Q: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dk and dv. Grid: ceil(seq_k / BLOCK_N) · batch · kv_heads.

    A program keeps BLOCK_N rows of one kv head's k and v, and the gradients of these rows. It walks
    over the rows of q of every query head that shares the kv head, and sums the contributions of
    these heads in fp32. With a causal mask, the first programs of a kv head have the longest walk,
    because later queries see all of the first keys. With few kv heads there are few, long programs,
    which can leave SMs idle.

    dk, dv: contiguous [batch, kv_heads, seq_k, head_dim].
    lse, delta: contiguous fp32 [batch, heads, seq_q]; lse as in `attention_forward`.
    EVEN_Q: whether seq_q % BLOCK_M == 0.
    """
    col_blocks = tl.cdiv(seq_k, BLOCK_N)
    first_col = tl.program_id(0) % col_blocks * BLOCK_N
    batch_kv_head = tl.program_id(0) // col_blocks
    batch = batch_kv_head // kv_heads
    kv_head = batch_kv_head % kv_heads
    if not DESCRIPTORS:
        k += head_offset(batch, kv_head, k_batch_stride, k_head_stride, ALIGN)
        v += head_offset(batch, kv_head, v_batch_stride, v_head_stride, ALIGN)
    k_rows, k_rest = load_rows(
        k,
        k_tail,
        batch,
        kv_head,
        first_col,
        seq_k,
        ROW_STRIDE=K_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    v_rows, v_rest = load_rows(
        v,
        v_tail,
        batch,
        kv_head,
        first_col,
        seq_k,
        ROW_STRIDE=V_ROW_STRIDE,
        ROWS=BLOCK_N,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    cols = first_col + tl.arange(0, BLOCK_N)
    dk_main = tl.zeros((BLOCK_N, MAIN), tl.float32)
    dv_main = tl.zeros((BLOCK_N, MAIN), tl.float32)
    # Without a tail, these are 16 columns that are not used, because a tensor cannot be empty.
    dk_rest = tl.zeros((BLOCK_N, TAIL if TAIL > 0 else 16), tl.float32)
    dv_rest = tl.zeros((BLOCK_N, TAIL if TAIL > 0 else 16), tl.float32)

    # The diagonal cuts rows [edge, whole) of q. Rows [whole, seq_q) see all columns of the program.
    edge = 0
    whole = 0
    if CAUSAL:
        edge = first_col // BLOCK_M * BLOCK_M
        whole = tl.minimum(tl.cdiv(first_col + BLOCK_N, BLOCK_M) * BLOCK_M, seq_q)
    for member in range(kv_group):
        head = kv_head * kv_group + member
        q_head = q
        do_head = do
        if not DESCRIPTORS:
            q_head += head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
            do_head += head_offset(batch, head, do_batch_stride, do_head_stride, ALIGN)
        statistics = (batch * (kv_heads * kv_group) + head).to(tl.int64) * seq_q
        if CAUSAL:
            dk_main, dk_rest, dv_main, dv_rest = _walk_rows(
                dk_main,
                dk_rest,
                dv_main,
                dv_rest,
                k_rows,
                k_rest,
                v_rows,
                v_rest,
                cols,
                q_head,
                q_tail,
                do_head,
                do_tail,
                lse + statistics,
                delta + statistics,
                batch,
                head,
                edge,
                whole,
                seq_q,
                scale_log2e,
                Q_ROW_STRIDE=Q_ROW_STRIDE,
                DO_ROW_STRIDE=DO_ROW_STRIDE,
                MAIN=MAIN,
                TAIL=TAIL,
                HEAD_DIM=HEAD_DIM,
                DESCRIPTORS=DESCRIPTORS,
                PRECISION=PRECISION,
                EDGE=True,
                BOUNDED=not EVEN_Q,
                BLOCK_M=BLOCK_M,
            )
        dk_main, dk_rest, dv_main, dv_rest = _walk_rows(
            dk_main,
            dk_rest,
            dv_main,
            dv_rest,
            k_rows,
            k_rest,
            v_rows,
            v_rest,
            cols,
            q_head,
            q_tail,
            do_head,
            do_tail,
            lse + statistics,
            delta + statistics,
            batch,
            head,
            whole,
            seq_q,
            seq_q,
            scale_log2e,
            Q_ROW_STRIDE=Q_ROW_STRIDE,
            DO_ROW_STRIDE=DO_ROW_STRIDE,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            PRECISION=PRECISION,
            EDGE=False,
            BOUNDED=not EVEN_Q,
            BLOCK_M=BLOCK_M,
        )

    out = batch_kv_head.to(tl.int64) * seq_k * HEAD_DIM
    store_rows(
        dk + out,
        dk_main * scale,
        dk_rest * scale,
        first_col,
        seq_k,
        ROW_STRIDE=HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
    )
    store_rows(
        dv + out,
        dv_main,
        dv_rest,
        first_col,
        seq_k,
        ROW_STRIDE=HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
    )


@triton.jit
def _walk_rows(
    dk,
    dk_rest,
    dv,
    dv_rest,
    k,
    k_rest,
    v,
    v_rest,
    cols,
    q,
    q_tail,
    do,
    do_tail,
    lse,
    delta,
    batch,
    head,
    start,
    end,
    seq_q,
    scale_log2e,
    Q_ROW_STRIDE: tl.constexpr,
    DO_ROW_STRIDE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds the contributions of rows [start, end) of q to dk / scale and dv.

    The scores are transposed: keys × queries.

    EDGE: whether the diagonal cuts these rows, so that scores must be masked.
    BOUNDED: whether the last block of rows may extend past seq_q.
    """
    for first_row in range(start, end, BLOCK_M):
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
            BOUNDED=BOUNDED,
        )
        rows = first_row + tl.arange(0, BLOCK_M)
        # Rows past the end of q get an infinite lse, so that their p is 0.
        row_lse = tl.load(lse + rows, mask=rows < seq_q, other=float("inf"))
        s = multiply_transposed(k, k_rest, q_rows, q_rest, TAIL, PRECISION)
        if EDGE:
            s = tl.where(cols[:, None] <= rows[None, :], s, float("-inf"))
        p = tl.exp2(s * scale_log2e - row_lse[None, :])
        do_rows, do_rest = load_rows(
            do,
            do_tail,
            batch,
            head,
            first_row,
            seq_q,
            ROW_STRIDE=DO_ROW_STRIDE,
            ROWS=BLOCK_M,
            MAIN=MAIN,
            TAIL=TAIL,
            HEAD_DIM=HEAD_DIM,
            DESCRIPTORS=DESCRIPTORS,
            BOUNDED=BOUNDED,
        )
        p_low = p.to(do_rows.dtype)
        dv = tl.dot(p_low, do_rows, dv, input_precision=PRECISION)
        row_delta = tl.load(delta + rows, mask=rows < seq_q, other=0.0)
        dp = multiply_transposed(v, v_rest, do_rows, do_rest, TAIL, PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(q_rows.dtype)
        dk = tl.dot(ds, q_rows, dk, input_precision=PRECISION)
        if TAIL > 0:
            dv_rest = tl.dot(p_low, do_rest, dv_rest, input_precision=PRECISION)
            dk_rest = tl.dot(ds, q_rest, dk_rest, input_precision=PRECISION)
    return dk, dk_rest, dv, dv_rest


@triton.jit
def attention_backward_q(
    q,
    k,
    v,
    do,
    q_tail,
    k_tail,
    v_tail,
    do_tail,
    dq,
    lse,
    delta,
    q_batch_stride,
    q_head_stride,
    k_batch_stride,
    k_head_stride,
    v_batch_stride,
    v_head_stride,
    do_batch_stride,
    do_head_stride,
    heads,
    kv_group,
    seq_q,
    seq_k,
    scale,
    scale_log2e,
    Q_ROW_STRIDE: tl.constexpr,
    K_ROW_STRIDE: tl.constexpr,
    V_ROW_STRIDE: tl.constexpr,
    DO_ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dq. Grid: ceil(seq_q / BLOCK_M) · batch · heads.

    A program keeps BLOCK_M rows of q with their gradient, and walks over k and v as in forward. The
    last row blocks start first. For each pair of blocks, this kernel and `attention_backward_kv`
    together run seven tl.dot: both compute s and dp, and each of dk, dv and dq is computed once.
    One kernel for all three would need five, but its programs would have to add to dq atomically,
    and the result would depend on their order.

    dq: contiguous [batch, heads, seq_q, head_dim].
    lse, delta: contiguous fp32 [batch, heads, seq_q].
    EVEN_K: whether seq_k % BLOCK_N == 0.
    """
    row_blocks = tl.cdiv(seq_q, BLOCK_M)
    batch_head = tl.program_id(0) // row_blocks
    first_row = (row_blocks - 1 - tl.program_id(0) % row_blocks) * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // kv_group
    if not DESCRIPTORS:
        q += head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
        k += head_offset(batch, kv_head, k_batch_stride, k_head_stride, ALIGN)
        v += head_offset(batch, kv_head, v_batch_stride, v_head_stride, ALIGN)
        do += head_offset(batch, head, do_batch_stride, do_head_stride, ALIGN)
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
    do_rows, do_rest = load_rows(
        do,
        do_tail,
        batch,
        head,
        first_row,
        seq_q,
        ROW_STRIDE=DO_ROW_STRIDE,
        ROWS=BLOCK_M,
        MAIN=MAIN,
        TAIL=TAIL,
        HEAD_DIM=HEAD_DIM,
        DESCRIPTORS=DESCRIPTORS,
        BOUNDED=True,
    )
    rows = first_row + tl.arange(0, BLOCK_M)
    statistics = batch_head.to(tl.int64) * seq_q + rows
    row_lse = tl.load(lse + statistics, mask=rows < seq_q, other=float("inf"))
    row_delta = tl.load(delta + statistics, mask=rows < seq_q, other=0.0)
    dq_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    # Without a tail, these are 16 columns that are not used, because a tensor cannot be empty.
    dq_rest = tl.zeros((BLOCK_M, TAIL if TAIL > 0 else 16), tl.float32)

    # As in forward, every row attends to all keys in [0, edge). The diagonal, or the end of the
    # keys, cuts the blocks in [edge, end).
    if CAUSAL:
        edge = first_row // BLOCK_N * BLOCK_N
        end = tl.minimum(first_row + BLOCK_M, seq_k)
    else:
        edge = seq_k // BLOCK_N * BLOCK_N
        end = seq_k
    if not CAUSAL and not EVEN_K:
        dq_main, dq_rest = _add_columns(
            dq_main,
            dq_rest,
            q_rows,
            q_rest,
            do_rows,
            do_rest,
            row_lse,
            row_delta,
            rows,
            k,
            k_tail,
            v,
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
        dq_main, dq_rest = _add_columns(
            dq_main,
            dq_rest,
            q_rows,
            q_rest,
            do_rows,
            do_rest,
            row_lse,
            row_delta,
            rows,
            k,
            k_tail,
            v,
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
    if CAUSAL:
        for n in range(edge, end, BLOCK_N):
            dq_main, dq_rest = _add_columns(
                dq_main,
                dq_rest,
                q_rows,
                q_rest,
                do_rows,
                do_rest,
                row_lse,
                row_delta,
                rows,
                k,
                k_tail,
                v,
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
    store_rows(
        dq + batch_head.to(tl.int64) * seq_q * HEAD_DIM,
        dq_main * scale,
        dq_rest * scale,
        first_row,
        seq_q,
        ROW_STRIDE=HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
    )


@triton.jit
def _add_columns(
    dq,
    dq_rest,
    q,
    q_rest,
    do,
    do_rest,
    row_lse,
    row_delta,
    rows,
    k,
    k_tail,
    v,
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
    """Adds the contributions of BLOCK_N rows of k and v, from row n on, to dq / scale.

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
    s = multiply_transposed(q, q_rest, k_rows, k_rest, TAIL, PRECISION)
    if EDGE:
        s = drop(s, rows, n, seq_k, CAUSAL)
    p = tl.exp2(s * scale_log2e - row_lse[:, None])
    dp = multiply_transposed(do, do_rest, v_rows, v_rest, TAIL, PRECISION)
    ds = (p * (dp - row_delta[:, None])).to(k_rows.dtype)
    dq = tl.dot(ds, k_rows, dq, input_precision=PRECISION)
    if TAIL > 0:
        dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision=PRECISION)
    return dq, dq_rest
