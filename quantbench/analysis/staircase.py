"""Candidate explanations of a staircase: a tile, and how many blocks of it run at a time; the waves each predicts.

Two explanations whose waves rise at the same points by the same shares predict one staircase: up to the height of a
step and a fixed overhead, nothing that is measured there can tell them apart. They make one `class`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from quantbench.launch import Tile
from quantbench.workload import Gemm

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

#: Sides of the tiles that libraries and our kernels use, in elements (names of cuBLAS, CUTLASS and nvjet kernels).
BLOCK_SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
#: and those of a processor's kernels, whose m side is a few rows of registers
CPU_BLOCK_SIDES = (1, 4, 6, 8, 12, 14, 16, 24, 28, 32, 48, 64, 96, 128)
#: no kernel keeps more output elements in one block's registers than this (320×128 is the largest seen)
_LARGEST_TILE = 256 * 192
#: blocks of one kernel that share an SM: products need registers and shared memory for few
MOST_BLOCKS_PER_SM = 4
#: blocks that may run at a time where the number of SMs is not known: from a small card's SMs to two blocks on each of
#: the largest card's
UNKNOWN_RESIDENT = (16, 400)


@dataclass(frozen=True)
class Explanation:
    """Tiles of block_m × block_n, `resident_blocks` of which run at a time."""

    block_m: int
    block_n: int
    resident_blocks: int

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, self.block_n)

    def per_sm(self, sm_count: int | None) -> int | None:
        """Blocks per SM on a device of sm_count SMs; None where that is not known or not a whole number."""
        if sm_count is None or self.resident_blocks % sm_count:
            return None
        return self.resident_blocks // sm_count


@dataclass(frozen=True)
class Candidates:
    """Explanations by class. waves: one row for each class (classes, points), of its first member. members: the
    explanations of each class."""

    waves: Ints
    members: tuple[tuple[Explanation, ...], ...]


def candidates(products: Sequence[Sequence[Gemm]], sides: Sequence[int], resident: Sequence[int]) -> Candidates:
    """All explanations with tile sides from `sides` and blocks at a time from `resident`, by class.

    products: the products of each curve; points run through them in that order.

    >>> sizes = [[Gemm(m=4096, n=n, k=64) for n in range(256, 4096, 256)]]
    >>> found = candidates(sizes, (128, 256), (108, 216))
    >>> [members for members in found.members if Explanation(128, 256, 108) in members]
    [(Explanation(block_m=128, block_n=128, resident_blocks=216), Explanation(block_m=128, block_n=256, \
resident_blocks=108), Explanation(block_m=256, block_n=128, resident_blocks=108))]
    """
    tiles = [(m, n) for m, n in product(sides, sides) if m * n <= _LARGEST_TILE]
    flat = [gemm for curve in products for gemm in curve]
    m, n, batch = (np.array([getattr(gemm, name) for gemm in flat], dtype=np.int64) for name in ("m", "n", "batch"))
    ends = np.cumsum([len(curve) for curve in products])
    by_class: dict[bytes, list[Explanation]] = {}
    rows: list[Ints] = []
    at_a_time = np.array(sorted(resident), dtype=np.int64)
    for block_m, block_n in tiles:
        num_tiles = batch * -(-m // block_m) * -(-n // block_n)
        waves = -(-num_tiles // at_a_time[:, None])
        waves = waves.astype(np.int32)
        shapes = _shape(waves, ends)
        for i, count in enumerate(at_a_time):
            key = shapes[i].tobytes()
            if key not in by_class:
                by_class[key] = []
                rows.append(waves[i])
            by_class[key].append(Explanation(block_m, block_n, int(count)))
    return Candidates(np.stack(rows), tuple(tuple(members) for members in by_class.values()))


def _shape(waves: Ints, ends: Ints) -> npt.NDArray[np.float32]:
    """What of each row of waves (rows, points) can be seen: on each curve, the rise since its smallest, as a share of
    its whole rise. In single precision, so that equal shares are equal bits."""
    shapes = np.empty(waves.shape, dtype=np.float32)
    start = 0
    for stop in ends:
        part = waves[:, start:stop]
        low = part.min(axis=1, keepdims=True)
        rise = np.maximum(part.max(axis=1, keepdims=True) - low, 1)
        shapes[:, start:stop] = (part - low) / rise
        start = stop
    return shapes
