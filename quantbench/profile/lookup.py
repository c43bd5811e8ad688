"""Which row of a table has these sizes: a million shapes a second at once, or one in a microsecond."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

# Odd constants with well-mixed bits: the golden ratio's and those of the finaliser of MurmurHash3 (64 bit).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)
# A table is twice as long as its keys or more: two looks find nearly every key.
_SPARE_BITS = 1


def hashed(sizes: tuple[IntArray, ...]) -> HashArray:
    """One 64-bit number for each row of several whole numbers, (rows,) each."""
    total = np.zeros(sizes[0].shape, dtype=np.uint64)
    for size in sizes:
        total += size.astype(np.uint64)
        total *= _STEP
        total ^= total >> _SHIFT
        total *= _MIX
    return np.asarray(total, dtype=np.uint64)


@dataclass(frozen=True)
class RowIndex:
    """sizes: the whole numbers that name each row, (rows,) each, no two rows alike.

    >>> index = RowIndex((np.array([1, 2, 2]), np.array([5, 5, 6])))
    >>> index.find((np.array([2, 2]), np.array([6, 7])))
    array([ 2, -1])
    >>> index.one(2, 5)
    1
    """

    sizes: tuple[IntArray, ...]

    def find(self, asked: tuple[IntArray, ...]) -> npt.NDArray[np.intp]:
        """(shapes,) the row that has exactly these sizes, -1 where there is none."""
        out = np.full(asked[0].shape, -1, dtype=np.intp)
        if not len(self.sizes[0]):
            return out
        slots, mask = self._slots
        place = (hashed(asked) >> _SHIFT) & mask
        left = np.arange(out.size)
        while left.size:
            row = slots[place]
            taken = row >= 0
            if not taken.all():
                left, place, row = left[taken], place[taken], row[taken]
            same = np.ones(left.size, dtype=bool)
            whole = left.size == out.size
            for have, want in zip(self.sizes, asked, strict=True):
                same &= have[row] == (want if whole else want[left])
            out[left[same]] = row[same]
            other = ~same
            left, place = left[other], (place[other] + np.uint64(1)) & mask
        return out

    def one(self, *asked: int) -> int:
        """The row of one shape, -1 where there is none."""
        return self._rows.get(asked, -1)

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], int]:
        return {key: row for row, key in enumerate(zip(*(size.tolist() for size in self.sizes), strict=True))}

    @cached_property
    def _slots(self) -> tuple[npt.NDArray[np.int32], np.uint64]:
        """An open-addressed table: the row in each slot, -1 in an empty one, and the mask of its length."""
        rows = len(self.sizes[0])
        length = 1 << (max(rows, 2).bit_length() + _SPARE_BITS)
        mask = np.uint64(length - 1)
        slots = np.full(length, -1, dtype=np.int32)
        place = (hashed(self.sizes) >> _SHIFT) & mask
        waiting = np.arange(rows, dtype=np.int32)
        while waiting.size:
            free = slots[place] < 0
            slots[place[free]] = waiting[free]  # of several rows that want one slot the last one written stays
            lost = slots[place] != waiting
            waiting, place = waiting[lost], (place[lost] + np.uint64(1)) & mask
        return slots, mask
