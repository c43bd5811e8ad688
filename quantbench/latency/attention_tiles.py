"""How attention kernels cut their work: the row blocks of each kernel family and the key blocks that each walks.

Sources: FlashAttention-3, hopper/tile_size.h (tile_size_fwd_sm90, tile_size_fwd_sm8x) and hopper/heuristics.h (query
heads that share keys are packed into rows when sequence lengths vary, as serving engines pass them); FlashAttention-2,
csrc/flash_attn/src/flash_fwd_launch_template.h (dense and paged forward); CUTLASS example 77 (Blackwell FMHA: two
blocks of 128 rows at a time). All of https://github.com/Dao-AILab/flash-attention and https://github.com/NVIDIA/cutlass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.latency.families import family_of

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Row blocks whose key blocks are counted one by one; beyond, the average is within 2 %.
_EXACT_BLOCKS = 64


@dataclass(frozen=True)
class KernelFamily:
    """One way of running attention. tile: (head_dim, causal) → (block_m, block_n). packs: whether query heads that
    share a key head are packed into the rows of one block (all families do it for a single query). splits: whether few
    row blocks make it split the keys over idle SMs. widths: what head_dim is padded to."""

    name: str
    tile: Callable[[int, bool], tuple[int, int]]
    packs: bool
    splits: bool
    widths: tuple[int, ...]

    def padded(self, head_dim: int) -> int:
        """The head width that the kernel computes with."""
        return next((w for w in self.widths if w >= head_dim), -(-head_dim // 64) * 64)


def _fa3_sm90(head_dim: int, causal: bool) -> tuple[int, int]:
    if head_dim <= 64:
        return (192, 128 if causal else 192)
    if head_dim <= 96:
        return (192, 144)
    if head_dim <= 128:
        return (128, 128 if causal else 176)
    return (128, 112 if head_dim <= 192 else 80)


def _fa3_sm80(head_dim: int, causal: bool) -> tuple[int, int]:
    if head_dim <= 64:
        return (128, 112)
    if head_dim <= 128:
        return (128, 64)
    return (128, 96)


def _fa2_dense(head_dim: int, causal: bool) -> tuple[int, int]:
    if head_dim <= 64:
        return (128, 128)
    return (128, 64)


def _fa2_paged(head_dim: int, causal: bool) -> tuple[int, int]:
    if head_dim <= 64:
        return (64, 256)
    return (64, 128 if head_dim <= 128 else 64)


def _blackwell(head_dim: int, causal: bool) -> tuple[int, int]:
    return (256, 128)


FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        KernelFamily("fa3_sm90", _fa3_sm90, True, True, (64, 96, 128, 192, 256)),
        KernelFamily("fa3_sm80", _fa3_sm80, True, True, (64, 96, 128, 192, 256)),
        KernelFamily("fa2_dense", _fa2_dense, False, False, (32, 64, 96, 128, 192, 256)),
        KernelFamily("fa2_paged", _fa2_paged, False, True, (32, 64, 96, 128, 192, 256)),
        KernelFamily("fmha_sm100", _blackwell, False, False, (32, 64, 128, 256)),
    )
}


def assumed_family(compute_capability: tuple[int, int] | None) -> KernelFamily:
    """The family taken for granted where no measurement tells: of the GPUs without a tensor core instruction of their
    own (wgmma, tcgen05), which sm_12x are among, the one that only needs mma.sync."""
    own = {"hopper": "fa3_sm90", "blackwell": "fmha_sm100"}
    return FAMILIES[own.get(family_of(compute_capability), "fa2_dense")]


@dataclass(frozen=True)
class Blocks:
    """How shapes fall into blocks under one family; every array is (n,).

    rows: thread blocks in the grid. keys: key blocks that all of them walk together. longest: key blocks of the
    longest one. block_m, block_n: the tile. width: the padded head_dim. group: query heads packed into the rows of a
    block. may_split: whether the keys of few row blocks are split over idle SMs.
    """

    rows: FloatArray
    keys: FloatArray
    longest: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    width: FloatArray
    group: FloatArray
    may_split: bool


def cut(
    family: KernelFamily,
    batch: IntArray,
    heads: IntArray,
    kv_heads: IntArray,
    seq_q: IntArray,
    seq_k: IntArray,
    head_dim: IntArray,
    causal: BoolArray,
) -> Blocks:
    """Blocks of each shape; all arguments are (n,)."""
    group = np.where(family.packs | (seq_q == 1), heads // kv_heads, 1)
    tiles = np.empty((3, len(batch)), dtype=np.int64)
    for width, masked in {(int(d), bool(c)) for d, c in zip(head_dim, causal, strict=True)}:
        where = (head_dim == width) & (causal == masked)
        tiles[:, where] = np.array([*family.tile(width, masked), family.padded(width)])[:, None]
    block_m, block_n, padded = tiles
    per_head = -(-seq_q * group // block_m)
    keys, longest = _key_blocks(per_head, seq_q, seq_k, group, block_m, block_n, causal)
    copies = batch * (heads // group)
    as_float = [x.astype(float) for x in (copies * per_head, block_m, block_n, padded, group)]
    return Blocks(
        rows=as_float[0], keys=copies * keys, longest=longest, block_m=as_float[1], block_n=as_float[2],
        width=as_float[3], group=as_float[4], may_split=family.splits,
    )  # fmt: skip


def _key_blocks(
    per_head: IntArray, seq_q: IntArray, seq_k: IntArray, group: IntArray, block_m: IntArray, block_n: IntArray,
    causal: BoolArray,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Key blocks walked by all row blocks of one head, and by the longest of them."""
    every = -(-seq_k // block_n)
    total, longest = (per_head * every).astype(float), every.astype(float)
    masked = np.flatnonzero(causal)
    few = masked[per_head[masked] <= _EXACT_BLOCKS]
    index = np.arange(_EXACT_BLOCKS)[None, :]
    # The last query of a row block sees the keys up to itself.
    last_row = np.minimum((index + 1) * block_m[few, None], seq_q[few, None] * group[few, None]) - 1
    walked = -(-(last_row // group[few, None] + 1) // block_n[few, None])
    total[few] = np.where(index < per_head[few, None], walked, 0).sum(axis=1)
    many = masked[per_head[masked] > _EXACT_BLOCKS]
    blocks, queries = per_head[many], block_m[many] / group[many]
    # Rounding up to whole key blocks adds half a block on average.
    total[many] = (blocks * (blocks + 1) / 2 * queries / block_n[many]) + blocks * 0.5 * (1 - 1 / block_n[many])
    return total, longest
