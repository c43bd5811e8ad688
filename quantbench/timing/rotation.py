"""Computes how many copies of the same work must run in turn to find their inputs not cached.

A flush within a graph would be timed too, and replays of a single run are warm from the second one
on (flashinfer issue 4468 is a "cold" graph that was warm). Copies with inputs and outputs of their
own stay cold if together they are several times as large as the cache.
"""

from collections.abc import Callable
from math import ceil

from quantbench.errors import require_int

Run = Callable[[], None]

#: A cache line counts as evicted if this many times the size of the cache has been read between two
#: uses of the line. With least-recently-used replacement, once is enough. With random replacement,
#: the worst of the common policies, a line survives misses of f times the size of the cache with
#: probability exp(-f), which is 37 % for f = 1 and 2 % for f = 4. NVIDIA does not publish its
#: policy. The value 4 also covers a cache of two halves that may each hold a copy of a line (A100,
#: H100).
COLD_L2_MULTIPLE = 4


def cold_copies(l2_bytes: int, min_bytes: int) -> int:
    """Returns how many copies of a run stay cold when they run in turn.

    Between two uses of one copy, the other copies read COLD_L2_MULTIPLE times l2_bytes.

    l2_bytes: size of the last-level cache, in bytes.
    min_bytes: least number of bytes that one run touches.

    >>> cold_copies(l2_bytes=50 * 2**20, min_bytes=10 * 2**20)
    21
    """
    require_int("cold_copies", "l2_bytes", l2_bytes, high=2**62)
    require_int("cold_copies", "min_bytes", min_bytes, high=2**62)
    return ceil(COLD_L2_MULTIPLE * l2_bytes / min_bytes) + 1
