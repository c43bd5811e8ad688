"""Which blocks attention is offered in on which GPU, and which are taken when nobody says. Pure: no tensors, no triton.

Every entry compiles for its architecture without spills and within the shared memory of one block (the tests compile
all of them). The first of each menu is the default. The sets follow what is known to be fast: on Hopper 128 × 128 with
8 warps for head_dim 128 and blocks half as long for smaller ones, softmax beside the next product (FlashAttention-3's
schedule; triton's own tutorial is the plain one with the same blocks); on Ampere FlashAttention-2's 128 rows with
blocks of k and v short enough to be held in registers, since its matrix instructions read both operands from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.errors import InputError
from quantbench.launch import Tile

#: plain: one block after the other. overlapped: softmax beside the next block's q·kᵀ (Hopper, by descriptors only).
SCHEDULES = ("plain", "overlapped")
#: what a program holds, and what is worth calling attention
MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 256

_SMALLEST_PART = 16  # what a matrix instruction takes


@dataclass(frozen=True)
class Setting:
    """One way to run forward. tile: block_m rows of q, block_n of k and v, stages, num_warps."""

    tile: Tile
    schedule: str = "plain"

    def __str__(self) -> str:
        return f"{self.tile} {self.tile.num_warps} warps {self.tile.stages} stages {self.schedule}"


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """(main, tail): the power-of-two parts that a row of head_dim elements is held in; tail 0 when one part is enough.

    >>> split_head_dim(128), split_head_dim(96), split_head_dim(72), split_head_dim(100)
    ((128, 0), (64, 32), (64, 16), (128, 0))
    """
    whole = max(_SMALLEST_PART, 1 << (head_dim - 1).bit_length())
    main = whole // 2
    tail = max(_SMALLEST_PART, 1 << (head_dim - main - 1).bit_length()) if head_dim > main else 0
    return (main, tail) if 0 < tail < main else (whole, 0)


def held_columns(head_dim: int) -> int:
    """Columns that a row of head_dim elements takes in registers and shared memory.

    >>> [held_columns(d) for d in (8, 40, 72, 96, 100, 192, 256)]
    [16, 48, 80, 96, 128, 192, 256]
    """
    return sum(split_head_dim(head_dim))


def _tile(block_m: int, block_n: int, num_warps: int, stages: int) -> Tile:
    return Tile(block_m, block_n, stages=stages, num_warps=num_warps)


def _plain(*blocks: tuple[int, int, int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(_tile(*block)) for block in blocks)


def _overlapped(*blocks: tuple[int, int, int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(_tile(*block), "overlapped") for block in blocks)


# By held columns up to …: (block_m, block_n, warps, stages).
_AMPERE = {
    64: _plain((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2)),
    96: _plain((128, 32, 8, 3), (64, 64, 4, 2)),
    128: _plain((128, 32, 8, 2), (64, 64, 4, 2)),
    192: _plain((128, 16, 8, 3), (64, 16, 8, 3)),
    256: _plain((64, 64, 8, 2), (64, 32, 8, 2)),
}
_ADA = {  # 99 KiB of shared memory per block
    64: _plain((128, 64, 8, 2), (64, 64, 4, 2)),
    96: _plain((128, 32, 8, 2), (64, 64, 4, 2)),
    128: _plain((64, 32, 4, 2), (128, 16, 8, 2)),
    192: _plain((128, 16, 8, 2)),
    256: _plain((64, 32, 8, 2)),
}
_HOPPER = {
    64: _overlapped((128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2)) + _plain((128, 64, 8, 3)),
    96: _overlapped((128, 128, 8, 2), (64, 64, 4, 2)) + _plain((128, 64, 8, 3)),
    128: _overlapped((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2)) + _plain((128, 128, 8, 2), (128, 64, 8, 3)),
    192: _overlapped((128, 64, 8, 2)) + _plain((128, 64, 8, 3), (64, 64, 4, 3)),
    256: _plain((128, 64, 8, 2), (64, 64, 4, 3)) + _overlapped((64, 64, 4, 2)),
}
_BLACKWELL = {
    64: _plain((128, 64, 4, 3), (128, 128, 8, 2)),
    96: _plain((128, 64, 4, 3), (128, 128, 8, 2)),
    128: _plain((128, 64, 4, 2), (128, 128, 8, 2)),
    192: _plain((128, 64, 8, 2), (64, 64, 4, 2)),
    256: _plain((128, 64, 8, 2), (64, 64, 4, 2)),
}
# Rows that no descriptor can address, on Hopper and Blackwell.
_BY_POINTERS = {
    96: _plain((128, 64, 8, 3), (64, 64, 4, 2)),
    128: _plain((128, 64, 8, 2), (64, 64, 4, 2)),
    192: _plain((128, 64, 8, 2), (64, 32, 8, 2)),
    256: _plain((64, 32, 8, 2)),
}
# fp32 is multiplied without tensor cores and unrolled whole: small blocks. To check with, not to be fast.
_SCALAR = {64: _plain((32, 32, 4, 1)), 256: _plain((16, 16, 4, 1))}

_FORWARD = {80: _AMPERE, 86: _ADA, 89: _ADA, 90: _HOPPER, 100: _BLACKWELL, 120: _ADA}
_WITH_DESCRIPTORS = (90, 100)

# Backward: (the kernel that keeps k and v, the kernel that keeps q).
_BACKWARD_AMPERE = {
    64: (_tile(16, 64, 4, 2), _tile(64, 32, 4, 2)),
    96: (_tile(16, 64, 4, 2), _tile(64, 32, 4, 2)),
    128: (_tile(32, 64, 8, 2), _tile(64, 64, 8, 2)),
    192: (_tile(32, 32, 8, 2), _tile(64, 16, 4, 2)),
    256: (_tile(32, 32, 8, 2), _tile(64, 32, 8, 2)),
}
_BACKWARD_HOPPER = {
    64: (_tile(64, 128, 8, 2), _tile(128, 64, 8, 2)),
    128: (_tile(32, 128, 8, 2), _tile(128, 64, 8, 2)),
    192: (_tile(32, 64, 8, 2), _tile(64, 64, 4, 2)),
    256: (_tile(32, 64, 8, 2), _tile(64, 64, 4, 2)),
}
_BACKWARD_BLACKWELL = {
    64: (_tile(32, 128, 8, 2), _tile(128, 64, 8, 2)),
    128: (_tile(64, 64, 8, 2), _tile(128, 64, 8, 2)),
    192: (_tile(32, 64, 8, 1), _tile(64, 64, 8, 2)),
    256: (_tile(32, 64, 8, 1), _tile(64, 32, 8, 2)),
}
_BACKWARD_BY_POINTERS = {
    64: (_tile(16, 64, 8, 2), _tile(64, 32, 8, 2)),
    96: (_tile(16, 64, 8, 2), _tile(64, 32, 8, 2)),
    128: (_tile(16, 32, 8, 2), _tile(32, 32, 8, 2)),
    256: (_tile(16, 32, 8, 2), _tile(32, 32, 8, 2)),
}
_BACKWARD_SCALAR = {64: (_tile(32, 16, 8, 1), _tile(32, 16, 8, 1)), 256: (_tile(16, 16, 4, 1), _tile(16, 16, 4, 1))}
_BACKWARD = {
    80: _BACKWARD_AMPERE,
    86: _BACKWARD_AMPERE,
    89: _BACKWARD_AMPERE,
    90: _BACKWARD_HOPPER,
    100: _BACKWARD_BLACKWELL,
    120: _BACKWARD_AMPERE,
}


def architecture(capability: tuple[int, int]) -> int:
    """The menu's architecture for a compute capability: the newest one that is not newer.

    >>> architecture((9, 0)), architecture((10, 3)), architecture((8, 7))
    (90, 100, 86)
    """
    number = 10 * capability[0] + capability[1]
    if number < min(_FORWARD):
        raise InputError("attention", f"sm_{number}", "compute capability 8.0 or newer")
    return max(arch for arch in _FORWARD if arch <= number)


def forward_menu(arch: int, head_dim: int, *, descriptors: bool, fp32: bool = False) -> tuple[Setting, ...]:
    """What forward is offered in, the default first. descriptors: whether q, k and v can be loaded by them."""
    if fp32:
        return _up_to(_SCALAR, head_dim)
    if arch in _WITH_DESCRIPTORS and not descriptors:
        return _up_to(_BY_POINTERS, head_dim)
    return _up_to(_FORWARD[arch], head_dim)


def backward_tiles(arch: int, head_dim: int, *, descriptors: bool, fp32: bool = False) -> tuple[Tile, Tile]:
    """The tiles of the kernel that keeps k and v and of the one that keeps q."""
    if fp32:
        return _up_to(_BACKWARD_SCALAR, head_dim)
    if arch in _WITH_DESCRIPTORS and not descriptors:
        return _up_to(_BACKWARD_BY_POINTERS, head_dim)
    return _up_to(_BACKWARD[arch], head_dim)


def _up_to(menu: dict, head_dim: int):
    return menu[min(limit for limit in menu if held_columns(head_dim) <= limit)]
