"""Provides copies of the same work that run in turn, so that each finds its inputs evicted from the
cache.

In a graph, a flush would be timed too, and replaying one run is warm from the second on (flashinfer
issue 4468 is a "cold" graph that was warm). Copies with inputs and outputs of their own, together
several times the cache, stay cold.
"""

from collections.abc import Callable
from math import ceil

from quantbench.errors import require_int

Run = Callable[[], None]

#: How many times the last-level cache must pass through it between two uses of a line for that line
#: to count as gone. With least-recently-used replacement once is enough; with random replacement,
#: the worst of the common policies, a line survives f caches' worth of misses with probability
#: exp(-f): 37 % at 1, 2 % at 4. NVIDIA does not publish its policy. 4 also covers a cache of two
#: halves that may each hold a copy of a line (A100, H100).
COLD_L2_MULTIPLE = 4


def cold_copies(l2_bytes: int, min_bytes: int) -> int:
    """Returns how many copies of a run that touches at least min_bytes stay cold when run in turn:
    between two uses of one copy, the others pass COLD_L2_MULTIPLE times l2_bytes through the cache.

    >>> cold_copies(l2_bytes=50 * 2**20, min_bytes=10 * 2**20)
    21
    """
    require_int("cold_copies", "l2_bytes", l2_bytes, high=2**62)
    require_int("cold_copies", "min_bytes", min_bytes, high=2**62)
    return ceil(COLD_L2_MULTIPLE * l2_bytes / min_bytes) + 1
