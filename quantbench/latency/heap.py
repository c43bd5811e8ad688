"""Memory that numpy frees stays with the process, so that arrays of a cost model need no fresh pages every time."""

from functools import cache

import numpy as np

_LARGE_BYTES = 16 << 20


@cache
def keep_freed_memory() -> None:
    """Once per process. glibc gives arrays beyond 128 KiB back to the kernel when they are freed, and a cost model's
    temporaries are just beyond: a fit from 200 rows took a million page faults. When one large block is freed, glibc
    raises that limit to its size (mallopt(3), "dynamic mmap threshold"). The block is never touched, so it costs
    nothing, and elsewhere than in glibc nothing happens."""
    np.empty(_LARGE_BYTES, dtype=np.uint8)
