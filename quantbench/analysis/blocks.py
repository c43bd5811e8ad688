"""Blocks and waves of any workload with a given tile, and what its padding and alignment are: exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.launch import Tile
from quantbench.quantization import alignment_bytes, cdiv, gemm_alignment_bytes
from quantbench.workload import Attention, Gemm, Softmax, Workload


@dataclass(frozen=True)
class TileInUse:
    """The tile a workload is computed with, and how many blocks of it run at a time.

    source: `launch` (read from the launch that was recorded), `steps` (recovered from the staircase of the run) or
    `assumed` (for the device). words: for people (`128x256 tile on 108 SMs`). waves: False where blocks are not seen to
    run in waves (one core; persistent kernels that share out work).
    """

    tile: Tile
    resident_blocks: int
    source: str
    words: str
    waves: bool = True

    @property
    def identified(self) -> bool:
        """Whether the kernel that ran told it."""
        return self.source == "launch"


def num_blocks(workload: Workload, tile: Tile) -> int | None:
    """Blocks that compute the workload; None where that does not follow from a tile.

    >>> num_blocks(Gemm(m=257, n=512, k=64), Tile(128, 256))
    6
    """
    match workload:
        case Gemm():
            tiles = cdiv(workload.m, tile.block_m) * cdiv(workload.n, tile.block_n)
            return workload.batch * tiles * tile.split_k
        case Attention():
            # Each block keeps block_m queries and walks over the keys; the backward pass may do it the other way.
            rows = workload.seq_q if workload.direction == "forward" else workload.seq_k
            return workload.batch * workload.heads * cdiv(rows, tile.block_m)
        case _:
            return None


def parts_to_fill(blocks: int, resident_blocks: int) -> int:
    """Into how many parts a library can cut each block (narrower tiles, or a split reduction) so that blocks of less
    than half a wave keep more SMs busy and still run at once: the largest such power of two.

    >>> parts_to_fill(24, 108), parts_to_fill(60, 108)
    (4, 1)
    """
    return int(1 << max(0, (resident_blocks // max(1, blocks)).bit_length() - 1))


def row_alignment_bytes(workload: Workload) -> int | None:
    """The largest power of two up to 128 that divides the rows in memory, in bytes; None for a collective."""
    match workload:
        case Gemm():
            return gemm_alignment_bytes(workload)
        case Attention():
            return alignment_bytes(workload.head_dim, workload.dtype)
        case Softmax():
            return alignment_bytes(workload.cols, workload.dtype)
        case _:
            return None


# Rows of head_dim go through the tensor cores in such steps; FlashAttention 2 compiles for multiples of 32.
_HEAD_DIM_STEP = 32


def padded(workload: Workload) -> tuple[str, int, int] | None:
    """What is padded beside the tile's own sides: (dimension, its size, what it pads to); None where nothing is.

    >>> padded(Softmax(batch=8, rows=96, cols=96))
    ('columns', 96, 128)
    """
    match workload:
        case Attention():
            return "head_dim", workload.head_dim, cdiv(workload.head_dim, _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        case Softmax():
            return "columns", workload.cols, 1 << (workload.cols - 1).bit_length()
        case _:
            return None


def compute_bound(workload: Workload, spec: DeviceSpec) -> bool:
    """Whether there is more to compute than to move, by the data sheet; True where the peak is not known."""
    peak = spec.peak(workload.dtype)
    return peak is None or workload.flops / (peak * 1e3) > workload.min_bytes / spec.memory_gb_per_s
