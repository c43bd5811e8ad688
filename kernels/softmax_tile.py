"""How many rows a softmax program holds and how many warps hold them. Pure: no tensors, no triton."""

from __future__ import annotations

from quantbench.errors import require_int
from quantbench.launch import Tile

#: Longest row: its 64 bytes of loads per thread fill the largest block of 1024 threads.
MAX_COLS = 16_384

_WARP_THREADS = 32
_MAX_WARPS = 32
_MIN_BLOCK_COLS = 16
_VECTOR_BYTES = 16
# Four 16-byte loads under way per thread. What keeps HBM busy is bytes in flight (Little's law: 4.8 TB/s times some
# 0.7 µs is 25 KB for each of an H200's 132 SMs), and more of them per thread costs the registers of another block.
_BYTES_PER_THREAD = 4 * _VECTOR_BYTES
# Scores per program, at least: blocks that move less than 16 KB come and go faster than they are handed out.
_MIN_SCORES = 4096


def softmax_tile(cols: int, element_bytes: int, direction: str = "forward") -> Tile:
    """Rows (block_m), row length rounded up to a power of two (block_n) and warps of a softmax program.

    Backward loads two scores where forward loads one.

    >>> softmax_tile(2048, 2)
    Tile(block_m=2, block_n=2048, block_k=None, split_k=1, stages=None, num_warps=4)
    """
    require_int("softmax", "cols", cols, high=MAX_COLS)
    block_cols = max(_MIN_BLOCK_COLS, 1 << (cols - 1).bit_length())
    loaded_bytes = element_bytes * (1 if direction == "forward" else 2)
    rows = max(1, _MIN_SCORES // block_cols)
    threads = rows * block_cols * loaded_bytes // _BYTES_PER_THREAD
    return Tile(rows, block_cols, num_warps=min(_MAX_WARPS, threads // _WARP_THREADS))


def vector_elements(cols: int, element_bytes: int) -> int:
    """Scores that a thread can move at a time in rows of `cols`: the largest power of two that divides it, 16 bytes at
    most.

    >>> vector_elements(2048, 2), vector_elements(2052, 2), vector_elements(2049, 2)
    (8, 4, 1)
    """
    return min(_VECTOR_BYTES // element_bytes, cols & -cols)
