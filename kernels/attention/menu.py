"""Lists the attention tiles for each GPU architecture; the first entry of each menu is the default.

Every entry compiles for its architecture without spills and within the shared memory of one block;
the tests compile all of them. The tiles of Hopper follow FlashAttention-3. They use the schedule
`overlapped` by default up to a head_dim of 192. The tiles of Ampere follow FlashAttention-2,
because Ampere's matrix instructions read both operands from registers. The module also computes how
many columns a row of head_dim elements takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.quantization import VECTOR_BYTES

#: plain runs one block after the other. overlapped runs the softmax beside the next block's q·kᵀ,
#: and needs descriptors.
SCHEDULES = ("plain", "overlapped")
#: Supported range of head_dim. A program holds at most 256 columns.
MIN_HEAD_DIM = 8
MAX_HEAD_DIM = 256

_SMALLEST_PART = 16  # smallest side that tl.dot accepts
_ELEMENT_BYTES = 2  # of fp16 and bf16; loads of 2 bytes take the menu for rows of odd length


@dataclass(frozen=True)
class Setting:
    """Tile and schedule of the forward kernel.

    tile: block_m rows of q, block_n rows of k and v, stages and num_warps.
    schedule: one of SCHEDULES.
    """

    tile: Tile
    schedule: str = "plain"

    def __str__(self) -> str:
        return f"{self.tile} {self.tile.num_warps} warps {self.tile.stages} stages {self.schedule}"


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Splits head_dim columns into two power-of-two parts, main and tail.

    The tail is 0 if two parts would take as many columns as one.

    >>> split_head_dim(128), split_head_dim(96), split_head_dim(72), split_head_dim(100)
    ((128, 0), (64, 32), (64, 16), (128, 0))
    """
    whole = _power_of_two(head_dim)
    main = whole // 2
    if head_dim > main:
        tail = _power_of_two(head_dim - main)
        if tail < main:
            return main, tail
    return whole, 0


def _power_of_two(columns: int) -> int:
    """Returns the width of a part that holds this many columns."""
    return max(_SMALLEST_PART, 1 << (columns - 1).bit_length())


def held_columns(head_dim: int) -> int:
    """Returns the columns that a row takes in registers and shared memory, padding included.

    >>> [held_columns(d) for d in (8, 40, 72, 96, 100, 192, 256)]
    [16, 48, 80, 96, 128, 192, 256]
    """
    return sum(split_head_dim(head_dim))


def _tile(block_m: int, block_n: int, num_warps: int, stages: int) -> Tile:
    return Tile(block_m, block_n, stages=stages, num_warps=num_warps)


def _plain(*blocks: tuple[int, int, int, int], schedule: str = "plain") -> tuple[Setting, ...]:
    """Returns settings from (block_m, block_n, warps, stages), all with the same schedule."""
    return tuple(Setting(_tile(*block), schedule) for block in blocks)


def _pairs(blocks: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[Tile, Tile]]:
    """Returns the tiles of the backward kernels by number of columns.

    blocks: eight numbers by number of columns: (block_m, block_n, warps, stages) of the kernel for
        dk and dv, and the same of the kernel for dq.
    """
    return {columns: (_tile(*both[:4]), _tile(*both[4:])) for columns, both in blocks.items()}


def _overlapped(*blocks: tuple[int, int, int, int]) -> tuple[Setting, ...]:
    return _plain(*blocks, schedule="overlapped")


# Each key is the largest number of `held_columns` that its menu serves. An entry of a menu is
# (block_m, block_n, warps, stages).
_AMPERE = {
    64: _plain((128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 4, 3)),
    128: _plain((128, 32, 8, 3), (64, 64, 4, 3)),
    192: _plain((128, 16, 8, 3), (64, 16, 8, 3)),
    256: _plain((64, 64, 8, 2), (64, 16, 8, 3)),
}
_ADA = {  # 99 KiB of shared memory per block
    128: _plain((64, 64, 4, 2)),
    192: _plain((128, 16, 8, 2)),
    256: _plain((64, 32, 8, 2)),
}
_HOPPER = {
    64: _overlapped((128, 128, 8, 2), (64, 128, 4, 2)) + _plain((128, 64, 8, 3)),
    96: _overlapped((128, 128, 8, 2), (64, 64, 4, 2)) + _plain((128, 64, 8, 3)),
    128: _overlapped((128, 128, 8, 2), (64, 64, 4, 2)) + _plain((128, 128, 8, 2), (128, 64, 8, 3)),
    192: _overlapped((128, 64, 8, 2)) + _plain((128, 64, 8, 3), (64, 64, 4, 3)),
    256: _plain((128, 64, 8, 2), (64, 64, 4, 3)) + _overlapped((64, 64, 4, 2)),
}
_BLACKWELL = {
    96: _plain((128, 64, 4, 3), (128, 128, 8, 2)),
    128: _plain((128, 64, 4, 2), (128, 128, 8, 2)),
    256: _plain((128, 64, 8, 2), (64, 64, 4, 2)),
}
# Rows that begin at multiples of 4 or 8 bytes. Their addresses take more registers, which leaves
# less room for blocks.
_AMPERE_NARROW = {
    64: _plain((128, 64, 8, 2)),
    96: _plain((128, 32, 8, 2)),
    128: _plain((64, 64, 8, 2)),
    192: _plain((32, 32, 8, 2)),
    256: _plain((64, 32, 8, 2)),
}
_HOPPER_BY_POINTERS = {128: _plain((128, 64, 8, 2)), 256: _plain((64, 64, 8, 2))}
_BLACKWELL_BY_POINTERS = {
    128: _plain((128, 64, 8, 2)),
    192: _plain((64, 32, 8, 2)),
    256: _plain((64, 16, 8, 2)),
}
# Rows of an odd number of 16-bit elements, which are read one element at a time.
_ODD = {
    64: _plain((64, 64, 8, 2)),
    128: _plain((64, 32, 8, 2)),
    192: _plain((64, 16, 8, 2)),
    256: _plain((32, 32, 8, 2)),
}
# fp32 is multiplied without tensor cores, in completely unrolled code. The blocks are small,
# because attention in fp32 serves checks and not speed.
_SCALAR = {64: _plain((32, 32, 4, 1)), 256: _plain((16, 16, 4, 1))}

# Backward menus with the same keys. An entry is (block_m, block_n, warps, stages) of the kernel for
# dk and dv, and then the same four numbers of the kernel for dq.
_BACKWARD_AMPERE = _pairs({
    64: (16, 128, 8, 2, 128, 64, 8, 2), 96: (16, 64, 8, 2, 128, 32, 8, 2),
    128: (32, 64, 8, 2, 64, 64, 8, 2), 192: (32, 32, 8, 2, 64, 32, 8, 2),
    256: (32, 32, 8, 2, 64, 32, 8, 2),
})  # fmt: skip
_BACKWARD_ADA = _BACKWARD_AMPERE | _pairs({
    128: (32, 64, 8, 2, 64, 32, 8, 2), 256: (32, 32, 8, 2, 32, 32, 8, 2),
})  # fmt: skip
_BACKWARD_HOPPER = _pairs({
    64: (64, 128, 8, 2, 128, 64, 8, 2), 128: (32, 128, 8, 2, 128, 64, 8, 2),
    256: (32, 64, 8, 2, 64, 64, 4, 2),
})  # fmt: skip
_BACKWARD_BLACKWELL = _pairs({
    64: (64, 64, 8, 2, 128, 64, 8, 2), 96: (32, 64, 8, 2, 128, 64, 8, 2),
    128: (64, 64, 8, 1, 128, 64, 8, 2), 192: (32, 64, 8, 1, 64, 64, 8, 2),
    256: (32, 64, 8, 1, 64, 32, 8, 2),
})  # fmt: skip
_BACKWARD_AMPERE_NARROW = _pairs({
    64: (32, 32, 8, 2, 64, 64, 8, 2), 96: (16, 16, 8, 2, 64, 32, 8, 2),
    128: (32, 32, 8, 2, 64, 32, 8, 2), 192: (16, 16, 8, 2, 32, 32, 8, 2),
    256: (16, 32, 8, 2, 32, 32, 8, 2),
})  # fmt: skip
_BACKWARD_HOPPER_BY_POINTERS = _pairs({
    96: (32, 64, 8, 2, 64, 64, 8, 2), 128: (32, 32, 8, 2, 64, 64, 8, 2),
    192: (16, 64, 8, 2, 64, 32, 8, 2), 256: (16, 16, 8, 2, 64, 32, 8, 2),
})  # fmt: skip
_BACKWARD_BLACKWELL_BY_POINTERS = _pairs({
    64: (32, 64, 8, 2, 64, 64, 8, 2), 96: (16, 16, 8, 2, 64, 64, 8, 2),
    128: (16, 32, 8, 2, 64, 64, 8, 2), 192: (16, 16, 8, 2, 64, 64, 8, 2),
    256: (16, 16, 8, 2, 64, 32, 8, 2),
})  # fmt: skip
_BACKWARD_ODD = _pairs({
    64: (32, 32, 8, 2, 64, 32, 8, 2), 96: (16, 16, 8, 2, 64, 32, 8, 2),
    128: (32, 32, 8, 2, 32, 32, 8, 2), 192: (16, 16, 8, 2, 32, 32, 8, 2),
    256: (32, 32, 8, 2, 32, 32, 8, 2),
})  # fmt: skip
_BACKWARD_SCALAR = _pairs({
    64: (32, 16, 8, 1, 32, 16, 8, 1), 256: (16, 16, 4, 1, 16, 16, 4, 1),
})  # fmt: skip


# Menus of forward and backward by architecture. Each has two tables: for 16-bit rows that begin at
# multiples of 16 bytes, and for other rows, which are loaded by pointers.
_ADA_MENUS = (_ADA, _AMPERE_NARROW), (_BACKWARD_ADA, _BACKWARD_AMPERE_NARROW)
_MENUS = {
    80: ((_AMPERE, _AMPERE_NARROW), (_BACKWARD_AMPERE, _BACKWARD_AMPERE_NARROW)),
    86: _ADA_MENUS,
    89: _ADA_MENUS,
    90: ((_HOPPER, _HOPPER_BY_POINTERS), (_BACKWARD_HOPPER, _BACKWARD_HOPPER_BY_POINTERS)),
    100: (
        (_BLACKWELL, _BLACKWELL_BY_POINTERS),
        (_BACKWARD_BLACKWELL, _BACKWARD_BLACKWELL_BY_POINTERS),
    ),
    120: _ADA_MENUS,
}
#: architectures whose main menus assume that TMA descriptors load the rows
WITH_DESCRIPTORS = (90, 100)


@dataclass(frozen=True)
class Loads:
    """How rows are loaded.

    bytes: bytes (2 to 16) that a thread loads at a time by a pointer.
    descriptors: whether the TMA unit loads the rows instead.
    """

    bytes: int = 16
    descriptors: bool = False


def architecture(capability: tuple[int, int]) -> int:
    """Returns the newest architecture of the attention menu that a compute capability supports.

    That is the newest architecture that is not newer than the capability itself. Raises InputError
    for capabilities below 8.0.

    >>> architecture((9, 0)), architecture((10, 3)), architecture((8, 7))
    (90, 100, 86)
    """
    number = 10 * capability[0] + capability[1]
    if number < min(_MENUS):
        raise InputError("attention", f"sm_{number}", "compute capability 8.0 or newer")
    return max(arch for arch in _MENUS if arch <= number)


def forward_menu(
    arch: int, head_dim: int, loads: Loads, *, fp32: bool = False
) -> tuple[Setting, ...]:
    """Returns the settings for forward, default first.

    arch: architecture, as returned by `architecture`.
    """
    return _entry(_MENUS[arch][0], _ODD, _SCALAR, arch, head_dim, loads, fp32)


def backward_tiles(
    arch: int, head_dim: int, loads: Loads, *, fp32: bool = False
) -> tuple[Tile, Tile]:
    """Returns the tile of the kernel for dk and dv, and the tile of the kernel for dq.

    arch: architecture, as returned by `architecture`.
    """
    return _entry(_MENUS[arch][1], _BACKWARD_ODD, _BACKWARD_SCALAR, arch, head_dim, loads, fp32)


_T = TypeVar("_T")


def _entry(
    tables: tuple[Mapping[int, _T], Mapping[int, _T]],
    odd: Mapping[int, _T],
    scalar: Mapping[int, _T],
    arch: int,
    head_dim: int,
    loads: Loads,
    fp32: bool,
) -> _T:
    """Returns the entry with the smallest key that holds head_dim, in the table for these loads.

    tables: tables for rows at multiples of 16 bytes, and for other rows.
    odd: table for rows that are read one element at a time.
    scalar: table for fp32.
    """
    if fp32:
        menu = scalar
    elif loads.descriptors or (loads.bytes == VECTOR_BYTES and arch not in WITH_DESCRIPTORS):
        menu = tables[0]
    elif loads.bytes > _ELEMENT_BYTES:
        menu = tables[1]
    else:
        menu = odd
    return menu[min(limit for limit in menu if held_columns(head_dim) <= limit)]
