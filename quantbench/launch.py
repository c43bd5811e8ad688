"""Describes a kernel launch: its grid, its resources, and the tile that each block computes.

The fields are fully known for quantbench's own kernels. For library kernels, some fields come from
the kernel's name or the profiler, and the others are None (unknown).
"""

import re
from dataclasses import dataclass

from quantbench.errors import InputError, require_int

_TILE = re.compile(
    r"(\d+)x(\d+)(?:x(\d+))?(?:-stages(\d+))?(?:-warps(\d+))?(?:-split(\d+))?", re.ASCII
)


@dataclass(frozen=True)
class Tile:
    """Part of the output that one thread block computes, and the split of the reduction.

    block_m, block_n: number of rows and of columns in the output tile.
    block_k: number of reduction elements per step of the main loop.
    split_k: number of blocks that each reduce a slice of k for the same output tile; 1 means no
        split.
    stages: depth of the software pipeline: number of steps whose operands are in flight.
    num_warps: number of warps per block.

    >>> Tile(128, 256, block_k=64).elements
    32768
    """

    block_m: int
    block_n: int
    block_k: int | None = None
    split_k: int = 1
    stages: int | None = None
    num_warps: int | None = None

    def __post_init__(self) -> None:
        require_int("Tile", "block_m", self.block_m, high=4096)
        require_int("Tile", "block_n", self.block_n, high=65536)
        require_int("Tile", "split_k", self.split_k, high=4096)
        for name in ("block_k", "stages", "num_warps"):
            value = getattr(self, name)
            if value is not None:
                require_int("Tile", name, value, high=4096)

    @classmethod
    def parse(cls, text: str) -> "Tile":
        """Parses a tile such as `128x256x64` (block_m × block_n × block_k).

        block_m and block_n are required. block_k, stages, num_warps and split_k may follow.

        Raises InputError for other texts.

        >>> Tile.parse("128x256"), Tile.parse("64x64x32-stages3-warps4-split2").split_k
        (Tile(block_m=128, block_n=256, block_k=None, split_k=1, stages=None, num_warps=None), 2)
        """
        found = _TILE.fullmatch(text)
        if found is None:
            raise InputError(
                "Tile", repr(text), "128x256, 128x256x64 or 128x256x64-stages3-warps8-split2"
            )
        m, n, k, stages, warps, split = map(_size, found.groups())
        return cls(m or 0, n or 0, k, 1 if split is None else split, stages, warps)

    @property
    def elements(self) -> int:
        """Number of elements in the output tile."""
        return self.block_m * self.block_n

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}"
        if self.block_k is not None:
            text += f"x{self.block_k}"
        if self.split_k > 1:
            text += f" split-k {self.split_k}"
        return text


def _size(text: str | None) -> int | None:
    return None if text is None else int(text)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, measured or predicted.

    kernel: full name of the kernel.
    grid: (x, y, z), size of the grid in blocks.
    block: (x, y, z), size of a block in threads.
    registers: number of registers per thread.
    shared_memory_bytes: static and dynamic shared memory per block.
    blocks_per_sm: maximum number of the kernel's blocks that are resident on one SM (its occupancy,
        not grid size / SM count).
    tile: tile that each block computes.
    """

    kernel: str
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_memory_bytes: int | None = None
    blocks_per_sm: int | None = None
    tile: Tile | None = None

    def __post_init__(self) -> None:
        if not self.kernel:
            raise InputError("Launch", "kernel = ''", "the kernel's name")
        for name in ("grid", "block"):
            dims = getattr(self, name)
            if dims is not None and (len(dims) != 3 or any(d < 1 for d in dims)):
                raise InputError("Launch", f"{name} = {dims!r}", "three integers of at least 1")

    @property
    def num_blocks(self) -> int | None:
        """Total number of blocks in the grid; None if the grid is unknown."""
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]
