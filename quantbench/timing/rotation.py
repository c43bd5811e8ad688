"""Copies of the same work, run in turn so that each finds its inputs gone from the cache.

Why: the cold time of a kernel of a few microseconds cannot be had from a graph by flushing in between (the flush is
timed too) nor by replaying one run (it is warm from the second on; flashinfer issue 4468 is a "cold" graph that was
silently warm, by 36 %, at some shapes only). Running copies in turn, each with inputs and outputs of its own and
together several times the cache, is cold by construction and needs no flush.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import overload

from quantbench.errors import require_int

Run = Callable[[], None]

#: How many times the last-level cache must pass through it between two uses of a line for that line to count as gone.
#: With least-recently-used replacement one cache's worth is enough; with random replacement, the worst of the common
#: policies, a line survives f caches' worth of misses with probability exp(-f): 37 % at 1, 2 % at 4. NVIDIA does not
#: publish its policy. 4 also covers a cache of two halves, where each line may be held once per half (A100, H100).
COLD_L2_MULTIPLE = 4


def cold_copies(l2_bytes: int, min_bytes: int) -> int:
    """Copies of work that touches at least min_bytes each, so that between two uses of one the others pass
    COLD_L2_MULTIPLE caches' worth through a cache of l2_bytes.

    >>> cold_copies(l2_bytes=50 * 2**20, min_bytes=10 * 2**20)
    21
    """
    require_int("cold_copies", "l2_bytes", l2_bytes, high=2**62)
    require_int("cold_copies", "min_bytes", min_bytes, high=2**62)
    return ceil(COLD_L2_MULTIPLE * l2_bytes / min_bytes) + 1


class LazyRuns(Sequence[Run]):
    """`count` runs of the same work on copies of its data, each made when it is first asked for.

    A timer given these makes the copies only if it decides to rotate. make: called with the copy's number from 0;
    its result is kept, so that the copy's data lives as long as this object.

    >>> made = []
    >>> runs = LazyRuns(3, lambda number: made.append(number) or (lambda: None))
    >>> len(runs), made
    (3, [])
    """

    def __init__(self, count: int, make: Callable[[int], Run]) -> None:
        self._count = require_int("LazyRuns", "count", count, low=0)
        self._make = make
        self._made: dict[int, Run] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"run {index} of {self._count}")
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]
