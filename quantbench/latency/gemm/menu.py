"""The kernels that a GEMM library is assumed to choose from: tiles, split_k, and resident blocks per SM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: block_m × block_n, as in the names of cuBLAS's and CUTLASS's kernels from Volta to Blackwell
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 128), (128, 32), (32, 64), (64, 32), (16, 128), (16, 64), (32, 256),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
#: an fp32 accumulator of this many elements fills half the registers of an SM: one such block is resident
LARGEST_TILE = 32768
MOST_BLOCKS_PER_SM = 6


def _groups(of: npt.NDArray[np.intp]) -> tuple[tuple[int, slice | npt.NDArray[np.intp]], ...]:
    """(group, where it stands) of each group: a slice where its members are neighbours, which copies nothing."""
    found: list[tuple[int, slice | npt.NDArray[np.intp]]] = []
    for group in np.unique(of):
        at = np.flatnonzero(of == group)
        together = at[-1] - at[0] + 1 == len(at)
        found.append((int(group), slice(int(at[0]), int(at[-1]) + 1) if together else at))
    return tuple(found)


def cdiv_array(size: FloatArray, block: float | FloatArray) -> FloatArray:
    """size / block, rounded up, for arrays of whole numbers."""
    return np.asarray(np.ceil(size / block))


@dataclass(frozen=True)
class Menu:
    """Kernels to choose from: every tile with every split, or a part of them.

    tiles: (block_m, block_n). kernels: (tile index, split_k) of each.
    """

    tiles: tuple[tuple[int, int], ...]
    kernels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.kernels:
            raise InputError("Menu", "no kernels", "at least one")

    @classmethod
    def of(cls, tiles: tuple[tuple[int, int], ...] = TILES) -> Menu:
        """All splits of all the tiles."""
        return cls(tiles, tuple((t, split) for t in range(len(tiles)) for split in SPLITS))

    def subset(self, chosen: npt.NDArray[np.intp]) -> Menu:
        """Only the kernels at these indices; the tiles stay, so that a tile's index means the same."""
        return Menu(self.tiles, tuple(self.kernels[int(i)] for i in chosen))

    def __len__(self) -> int:
        return len(self.kernels)

    @cached_property
    def tile_index(self) -> npt.NDArray[np.intp]:
        """(kernels,) index of each kernel's tile."""
        return np.array([t for t, _ in self.kernels], dtype=np.intp)

    @cached_property
    def split_k(self) -> FloatArray:
        """(kernels,) parts of k."""
        return np.array([split for _, split in self.kernels], dtype=np.float64)

    @cached_property
    def block_m(self) -> FloatArray:
        """(kernels,) rows of the output tile."""
        return np.array([self.tiles[t][0] for t, _ in self.kernels], dtype=np.float64)

    @cached_property
    def block_n(self) -> FloatArray:
        """(kernels,) columns of the output tile."""
        return np.array([self.tiles[t][1] for t, _ in self.kernels], dtype=np.float64)

    @cached_property
    def blocks_per_sm(self) -> FloatArray:
        """(kernels,) resident blocks, as the accumulator's registers allow."""
        return np.clip(np.floor(LARGEST_TILE / (self.block_m * self.block_n)), 1, MOST_BLOCKS_PER_SM)

    @cached_property
    def of_tile(self) -> tuple[tuple[int, slice | npt.NDArray[np.intp]], ...]:
        """(tile index, its kernels) of each tile that has any."""
        return _groups(self.tile_index)

    @cached_property
    def of_split(self) -> tuple[tuple[int, slice | npt.NDArray[np.intp]], ...]:
        """(index in SPLITS, its kernels) of each split that has any; those between count as the next larger."""
        return _groups(np.minimum(np.searchsorted(SPLITS, self.split_k), len(SPLITS) - 1))

    @cached_property
    def each(self) -> Kernels:
        """Every kernel for every row."""
        return self._kernels(np.arange(len(self))[:, None])

    def by_row(self, kernel: npt.NDArray[np.intp]) -> Kernels:
        """One kernel for each row, (rows,) indices."""
        return self._kernels(kernel[None, :])

    def _kernels(self, index: npt.NDArray[np.intp]) -> Kernels:
        return Kernels(
            tile_index=self.tile_index[index],
            split_k=self.split_k[index],
            block_m=self.block_m[index],
            block_n=self.block_n[index],
            blocks_per_sm=self.blocks_per_sm[index],
        )

    def nearest(self, block_m: int, block_n: int, split_k: int) -> int:
        """Index of the kernel closest to a recorded tile and split, in factors."""
        distance = (
            np.abs(np.log2(self.block_m / block_m))
            + np.abs(np.log2(self.block_n / block_n))
            + np.abs(np.log2(self.split_k / split_k))
        )
        return int(np.argmin(distance))


@dataclass(frozen=True)
class Kernels:
    """What Menu says of its kernels, to be held against rows of shapes: (kernels, 1), or (1, rows) where each row has
    one kernel."""

    tile_index: npt.NDArray[np.intp]
    split_k: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    blocks_per_sm: FloatArray
