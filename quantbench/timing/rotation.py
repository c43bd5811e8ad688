"""Provides copies of the same work that run in turn, so that each finds its inputs evicted from the cache.

Entry points: `cold_copies` (how many, from `COLD_L2_MULTIPLE`), `LazyRuns` (makes them on demand), `Run`. Used by the
other modules of `timing`, by `sweep.worker`, `sweep.plan` and tools.

In a graph, a flush would be timed too, and replaying one run is warm from the second on (flashinfer issue 4468 is a
"cold" graph that was warm). Copies with inputs and outputs of their own, together several times the cache, stay cold.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from typing import overload

from quantbench.errors import require_int

Run = Callable[[], None]

#: How many times the last-level cache must pass through it between two uses of a line for that line to count as gone.
#: With least-recently-used replacement once is enough; with random replacement, the worst of the common policies, a
#: line survives f caches' worth of misses with probability exp(-f): 37 % at 1, 2 % at 4. NVIDIA does not publish its
#: policy. 4 also covers a cache of two halves that may each hold a copy of a line (A100, H100).
COLD_L2_MULTIPLE = 4


def cold_copies(l2_bytes: int, min_bytes: int) -> int:
    """Returns how many copies of a run that touches at least min_bytes stay cold when run in turn: between two uses of
    one copy, the others pass COLD_L2_MULTIPLE times l2_bytes through the cache.

    >>> cold_copies(l2_bytes=50 * 2**20, min_bytes=10 * 2**20)
    21
    """
    require_int("cold_copies", "l2_bytes", l2_bytes, high=2**62)
    require_int("cold_copies", "min_bytes", min_bytes, high=2**62)
    return ceil(COLD_L2_MULTIPLE * l2_bytes / min_bytes) + 1


class LazyRuns(Sequence[Run]):
    """Sequence of `count` runs of the same work on copies of its data, each created at its first access.

    A timer creates the copies only if it rotates. make: called once with the copy's number, from 0; the copy lives as
    long as this object.

    >>> made = []
    >>> runs = LazyRuns(3, lambda number: made.append(number) or (lambda: None))
    >>> len(runs), made
    (3, [])
    """

    def __init__(self, count: int, make: Callable[[int], Run]) -> None:
        self._numbers = range(require_int("LazyRuns", "count", count, low=0))
        self._make = cache(make)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        if isinstance(index, slice):
            return [self._make(number) for number in self._numbers[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(f"run {index} of {len(self)}")
        return self._make(self._numbers[index])
