"""Computes how many copies of a run must rotate in a CUDA graph to keep the cache cold.

A flush within a graph would be timed too. Without a flush, a repeated run finds its data cached
from its second execution on (in flashinfer issue 4468, a "cold" graph was warm). Copies of the run
with separate inputs and outputs evict each other's data if together they are several times as large
as the cache.
"""

from collections.abc import Callable
from math import ceil

from quantbench.errors import require_int

#: Function that does the work once, or queues it on the current CUDA stream.
Run = Callable[[], None]

#: Number of cache sizes to read between two uses of a cache line, so that the line is evicted. With
#: least-recently-used replacement, 1 is enough. With random replacement, the worst common policy, a
#: line survives reads of f cache sizes with probability exp(-f): 37 % for f = 1, and 2 % for f = 4.
#: NVIDIA does not publish its policy. The value 4 also suffices for a cache of two halves that may
#: each contain a copy of the line (A100, H100).
COLD_L2_MULTIPLE = 4


def cold_copies(l2_bytes: int, min_bytes: int) -> int:
    """Returns the number of copies of a run that must run in turn to stay cold.

    Between two runs of one copy, the other copies touch COLD_L2_MULTIPLE · l2_bytes or more.

    l2_bytes: size of the last-level cache, in bytes.
    min_bytes: minimum number of bytes that one run touches.

    >>> cold_copies(l2_bytes=50 * 2**20, min_bytes=10 * 2**20)
    21
    """
    require_int("cold_copies", "l2_bytes", l2_bytes, high=2**62)
    require_int("cold_copies", "min_bytes", min_bytes, high=2**62)
    return ceil(COLD_L2_MULTIPLE * l2_bytes / min_bytes) + 1
