"""How sure the ratio of two predicted times is, when much of what is wrong with one is wrong with the other as well.

Each operation's log error has a half-width (from its own interval), and two operations of one kind (products, softmax,
attention, each with a model of its own) share CORRELATION of it; the same operation on both sides has the same error,
which cancels. So the interval of a ratio is narrower than that of two independent times, and 1 ± 0 for a shape against
itself. On a device where nothing was measured one would expect errors still more alike, which would make the ratio's
interval narrower than it deserves: the same CORRELATION is taken there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, log, sqrt

from quantbench.latency.transformer import CORRELATION
from quantbench.planner.op_times import Latency
from quantbench.workload.transformer import Compute

#: an operation's part of a sum, 0 to 1, and its own time
Parts = Mapping[Compute, tuple[float, Latency]]


def ratio_factor(above: Parts, below: Parts, correlation: float = CORRELATION) -> float:
    """The factor by which the ratio of two sums may be off, nine times out of ten, to either side.

    above, below: the two sums by operation; shares of each are of its own whole.

    >>> from quantbench.workload import Gemm
    >>> work = Gemm(m=4096, n=4096, k=4096)
    >>> sums = {work: (1.0, Latency(90.0, 100.0, 110.0))}
    >>> ratio_factor(sums, sums)
    1.0
    """
    alone = 0.0
    together: dict[str, float] = defaultdict(float)
    for work in dict.fromkeys((*above, *below)):
        share = above.get(work, (0.0, None))[0] - below.get(work, (0.0, None))[0]
        latency = (above.get(work) or below[work])[1]
        part = share * log(latency.high / latency.low) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(sqrt((1 - correlation) * alone + correlation * shared))
