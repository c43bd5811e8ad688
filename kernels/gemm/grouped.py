"""Multiplies the rows of each expert by the expert's own weights, in one launch for all experts.

Rows are sorted by expert, and tokens_per_expert gives the number of rows of each expert. a[rows, k]
and b[experts, k, n] give c[rows, n], which serves the forward pass and the gradient of the rows.
a[k, rows] and b[rows, n] give c[experts, k, n], the gradient of the weights, whose reduction runs
over the rows of one expert.
"""

# ruff: noqa: N803  (compile-time parameters are written in capitals, as in Triton's own kernels)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate as running_sums

import torch
import triton
import triton.language as tl
from quantbench.kernels import launching
from quantbench.kernels.gemm import host
from quantbench.kernels.gemm.config import (
    WHO,
    Config,
    Operands,
    align_bytes,
    backend_options,
    box_shapes,
    configure,
    constexprs,
)
from quantbench.kernels.gemm.kernels import (
    accumulate,
    known_multiple,
    load_box,
    store_tile,
    tile_position,
)
from quantbench.kernels.gemm.menu import pick
from quantbench.kernels.launching import Plan

from quantbench.errors import InputError, require_choice
from quantbench.launch import Tile
from quantbench.quantization import cdiv

SCHEDULES = ("data_parallel", "persistent")


@triton.jit
def _tile(
    index,
    a,
    b,
    c,
    ends,
    tile_rows,
    tiles_m,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
):
    """Computes one tile of c. Each expert's rows begin a new tile.

    Pointers write the result, because a TMA box would overwrite the next expert's first rows. For
    the gradient of the weights, pointers also read the operands, because a box would add the next
    expert's rows.

    index: number of the tile, counted over all experts.
    ends: (experts + 1,), end of each expert's rows, after a leading 0.
    tile_rows: (tiles_m, 2), the expert of each row of tiles, and the row's index in that expert.
    OF_WEIGHTS: whether c is the gradient of the weights. In this case tiles_m is the number of rows
        of tiles of one expert, and k is not used. Otherwise tiles_m counts all experts' rows of
        tiles.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    if OF_WEIGHTS:
        expert = index // (tiles_m * tiles_n)
        tile_m, tile_n = tile_position(index % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    else:
        tile_row, tile_n = tile_position(index, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_rows + 2 * tile_row)
        tile_m = tl.load(tile_rows + 2 * tile_row + 1)
    start = tl.load(ends + expert)
    rows = tl.load(ends + expert + 1) - start
    # The tile belongs to a GEMM of `height` rows with a reduction of `depth`. Pointers into tensors
    # that hold the rows of all experts advance to this expert's first row, so these tensors need no
    # stride from expert to expert.
    if OF_WEIGHTS:
        height = m
        depth = rows
        b_stride = 0
        c_stride = batch_stride_c
        a += start.to(tl.int64) * known_multiple(lda, ALIGN_A)
        b += start.to(tl.int64) * known_multiple(ldb, ALIGN_B)
    else:
        height = rows
        depth = k
        b_stride = batch_stride_b
        c_stride = 0
    # An expert without rows gets one step, of zeros, for the reason in `gemm_data_parallel`.
    steps = tl.maximum(tl.cdiv(depth, BLOCK_K), 1)
    if LOAD_DESCRIPTORS:
        # A box may read rows of the next expert after this expert's last row. The results of these
        # rows are never stored.
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        row = start + tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        for step in range(steps):
            at = step * BLOCK_K
            a_block = load_box(
                a,
                0,
                row,
                at,
                TRANSPOSED=A_TRANSPOSED,
                BATCHED=False,
                ROWS=BLOCK_M,
                COLS=BLOCK_K,
            )
            b_block = load_box(
                b,
                expert,
                at,
                col,
                TRANSPOSED=B_TRANSPOSED,
                BATCHED=True,
                ROWS=BLOCK_K,
                COLS=BLOCK_N,
            )
            acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
    else:
        if not OF_WEIGHTS:
            a += start.to(tl.int64) * known_multiple(lda, ALIGN_A)
        acc = accumulate(
            a,
            b,
            expert,
            tile_m,
            tile_n,
            0,
            steps,
            height,
            n,
            depth,
            lda,
            ldb,
            0,
            b_stride,
            A_TRANSPOSED=A_TRANSPOSED,
            B_TRANSPOSED=B_TRANSPOSED,
            ALIGN_A=ALIGN_A,
            ALIGN_B=ALIGN_B,
            DESCRIPTORS=False,
            BATCHED=False,
            EVEN_K=EVEN_K and not OF_WEIGHTS,
            PRECISION=PRECISION,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
    if not OF_WEIGHTS:
        c += start.to(tl.int64) * known_multiple(ldc, ALIGN_C)
    store_tile(
        c,
        acc,
        expert,
        tile_m,
        tile_n,
        height,
        n,
        ldc,
        c_stride,
        ALIGN_C=ALIGN_C,
        DESCRIPTORS=False,
        BATCHED=False,
        SUBTILES=1,
    )


@triton.jit(do_not_specialize=["experts", "tiles_m"])
def grouped_data_parallel(
    a,
    b,
    c,
    ends,
    tile_rows,
    experts,
    tiles_m,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
):
    """Multiplies with one program per tile of all experts. The arguments are those of `_tile`."""
    _tile(
        tl.program_id(0),
        a,
        b,
        c,
        ends,
        tile_rows,
        tiles_m,
        m,
        n,
        k,
        lda,
        ldb,
        ldc,
        batch_stride_b,
        batch_stride_c,
        A_TRANSPOSED=A_TRANSPOSED,
        B_TRANSPOSED=B_TRANSPOSED,
        ALIGN_A=ALIGN_A,
        ALIGN_B=ALIGN_B,
        ALIGN_C=ALIGN_C,
        LOAD_DESCRIPTORS=LOAD_DESCRIPTORS,
        EVEN_K=EVEN_K,
        PRECISION=PRECISION,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M,
        OF_WEIGHTS=OF_WEIGHTS,
    )


@triton.jit(do_not_specialize=["experts", "tiles_m"])
def grouped_persistent(
    a,
    b,
    c,
    ends,
    tile_rows,
    experts,
    tiles_m,
    m,
    n,
    k,
    lda,
    ldb,
    ldc,
    batch_stride_b,
    batch_stride_c,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    ALIGN_C: tl.constexpr,
    LOAD_DESCRIPTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
):
    """Multiplies with P programs, one per block slot of the device.

    Program p computes tiles p, p + P, p + 2P, … The arguments are those of `_tile`.
    """
    tiles = tiles_m * tl.cdiv(n, BLOCK_N)
    if OF_WEIGHTS:
        tiles *= experts
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _tile(
            index,
            a,
            b,
            c,
            ends,
            tile_rows,
            tiles_m,
            m,
            n,
            k,
            lda,
            ldb,
            ldc,
            batch_stride_b,
            batch_stride_c,
            A_TRANSPOSED=A_TRANSPOSED,
            B_TRANSPOSED=B_TRANSPOSED,
            ALIGN_A=ALIGN_A,
            ALIGN_B=ALIGN_B,
            ALIGN_C=ALIGN_C,
            LOAD_DESCRIPTORS=LOAD_DESCRIPTORS,
            EVEN_K=EVEN_K,
            PRECISION=PRECISION,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            GROUP_M=GROUP_M,
            OF_WEIGHTS=OF_WEIGHTS,
        )


KERNELS = {"data_parallel": grouped_data_parallel, "persistent": grouped_persistent}


def grouped_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    tokens_per_expert: Sequence[int],
    *,
    tile: Tile | None = None,
    schedule: str = "data_parallel",
    tf32: bool = False,
) -> torch.Tensor:
    """Computes the GEMM of each expert, accumulated in fp32. No gradients are computed.

    The arguments and the errors are those of `plan`.

    >>> rows, weights = torch.randn(5, 64), torch.randn(3, 64, 32)  # doctest: +SKIP
    >>> grouped_matmul(rows, weights, (4, 0, 1)).shape  # doctest: +SKIP
    torch.Size([5, 32])
    """
    work = plan(a, b, tokens_per_expert, tile=tile, schedule=schedule, tf32=tf32)
    work.run()
    return work.out


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    tokens_per_expert: Sequence[int],
    *,
    tile: Tile | None = None,
    schedule: str = "data_parallel",
    tf32: bool = False,
    path: str = "auto",
    programs: int | None = None,
) -> Plan:
    """Checks the operands, chooses and compiles the kernel, and allocates its buffers.

    The table of tiles is made here on the host, so the timed launch does not include it.

    a, b: [rows, k] and [experts, k, n], or [k, rows] and [rows, n] for the gradient of the weights.
    tokens_per_expert: number of rows of each expert. The numbers add up to `rows`.
    tile: fields that are None come from the menu. Without a tile, `menu.pick` selects one for the
        mean number of rows of the experts that have rows.
    schedule: data_parallel or persistent.
    tf32: whether fp32 operands are multiplied in tf32.
    path: how the kernel loads the operands, as `operands` in `host.plan`.
    programs: number of programs of the persistent schedule; None for the number of resident blocks.

    Raises InputError for invalid operands and tiles, and UnsupportedError for a GPU or a dtype that
    the kernels do not run on.
    """
    require_choice(WHO, "schedule", schedule, SCHEDULES)
    operands, out = _checked(a, b, tokens_per_expert, tf32)
    gpu = launching.gpu_of(a, host.INTERPRETED)
    tile = tile or pick(
        operands.gemm, schedule, gpu.capability, gpu.sm_count, align_bytes(operands)
    )
    of_weights = b.dim() == 2
    config = configure(
        operands, schedule, tile, gpu.capability, path="pointers" if of_weights else path
    )
    arguments, tiles = kernel_arguments(a, b, out, operands, config, tokens_per_expert)
    kernel = KERNELS[schedule]
    described = launching.describe(WHO, kernel, arguments, a.device, config.tile)
    resident = gpu.sm_count * (described.blocks_per_sm or 1)
    grid = tiles if schedule == "data_parallel" else min(tiles, programs or resident)
    return Plan((out,), (launching.enqueue(kernel, (grid, 1, 1), arguments, described),))


def kernel_arguments(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    operands: Operands,
    config: Config,
    tokens_per_expert: Sequence[int],
) -> tuple[dict[str, object], int]:
    """Returns all arguments of the kernel, and the number of tiles of all experts."""
    gemm = operands.gemm
    tile = config.tile
    of_weights = b.dim() == 2
    experts = len(tokens_per_expert)
    tile_rows: list[tuple[int, int]] = []
    for expert, count in enumerate(tokens_per_expert):
        tile_rows += [(expert, index) for index in range(cdiv(count, tile.block_m))]
    if of_weights:
        tiles_m = cdiv(gemm.m, tile.block_m)
        rows_of_tiles = tiles_m * experts
    else:
        tiles_m = rows_of_tiles = len(tile_rows)
    given = {
        "a": a,
        "b": b,
        "c": c,
        "ends": torch.tensor(
            (0, *running_sums(tokens_per_expert)), dtype=torch.int32, device=a.device
        ),
        "tile_rows": torch.tensor(tile_rows, dtype=torch.int32, device=a.device),
        "experts": experts,
        "tiles_m": tiles_m,
        "OF_WEIGHTS": of_weights,
    }
    if config.load_descriptors:
        boxes = box_shapes(replace(operands, gemm=replace(gemm, batch=1)), config)
        given["a"] = host.descriptor(a, operands.a, boxes["a"])
        given["b"] = host.descriptor(b, operands.b, [1, *boxes["b"]])
    shared = host.sizes(operands) | constexprs(operands, config)
    given |= host.accepted(KERNELS[config.schedule], shared) | backend_options(config)
    return given, rows_of_tiles * cdiv(gemm.n, tile.block_n)


def _checked(
    a: torch.Tensor, b: torch.Tensor, tokens_per_expert: Sequence[int], tf32: bool
) -> tuple[Operands, torch.Tensor]:
    """Validates the operands, and returns their storage and a new result tensor.

    The size is described as a batch of GEMMs with the mean number of rows of the experts that have
    rows. Only the choice of the tile and its configuration depend on this mean. Raises InputError
    for incompatible operands.
    """
    if a.dim() != 2 or b.dim() not in (2, 3):
        shapes = f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)}"
        raise InputError(WHO, shapes, "[rows, k] and [experts, k, n], or [k, rows] and [rows, n]")
    of_weights = b.dim() == 2
    experts = len(tokens_per_expert)
    rows = a.shape[1 if of_weights else 0]
    if min(tokens_per_expert, default=-1) < 0 or sum(tokens_per_expert) != rows:
        value = f"tokens_per_expert of {experts} experts, {sum(tokens_per_expert)} in all"
        raise InputError(WHO, value, f"counts of at least 0 that add up to the {rows} rows of a")
    if not of_weights and b.shape[0] != experts:
        raise InputError(WHO, f"b of {b.shape[0]} experts", f"{experts}, as tokens_per_expert has")
    one, out = host.check(a, b if of_weights else b[0], None, tf32)
    mean_rows = cdiv(rows, sum(count > 0 for count in tokens_per_expert))
    if of_weights:
        out = out.new_empty(experts, *out.shape)
        gemm = replace(one.gemm, k=mean_rows, batch=experts)
        return Operands(gemm, one.a, one.b, host.stored_in_rows(out)), out
    gemm = replace(one.gemm, m=mean_rows, batch=cdiv(rows, mean_rows))
    return Operands(gemm, one.a, host.stored("b", b), one.c), out
