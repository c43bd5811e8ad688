"""How sure the ratio of two predicted times is: what is wrong with both alike is not wrong with their ratio.

Each operation's log error has a half-width, from its own interval. Operations of one kind (products, softmax,
attention: each has a model of its own) have a part of their errors in common, which cancels as far as both sides have
the same share of that kind; and the same operation on both sides has the same error, which cancels altogether. So the
interval is 1 ± 0 for a shape against itself and narrow for shapes that differ in few operations.

How much is in common was held against five public tables (A100, H100, H200, B200, L40S; rows that the shipped models
were not fitted on, sides of at least 1024): the ratio of four products to four neighbours of theirs. Of a fitted model,
which is right on average, nothing is in common, and its intervals are too narrow for such products by up to WIDER. Of
a GPU that nothing was measured on, most is in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, log, sqrt

from quantbench.latency.estimate import Estimate
from quantbench.workload.ops import Compute

#: with it the ratios of those tables lie within their intervals 99, 93, 92, 92 and 90 % of the time
WIDER = 1.3

#: an operation's part of a sum, 0 to 1, and its own time
Parts = Mapping[Compute, tuple[float, Estimate]]


def ratio_factor(above: Parts, below: Parts, common: float = 0.0) -> float:
    """The factor by which the ratio of two sums may be off, nine times out of ten, to either side.

    above, below: the two sums by operation; shares of each are of its own whole. common: the part of their errors that
    operations of one kind have in common.

    >>> from quantbench.workload import Gemm
    >>> work = Gemm(m=4096, n=4096, k=4096)
    >>> sums = {work: (1.0, Estimate(100.0, 90.0, 110.0))}
    >>> ratio_factor(sums, sums)
    1.0
    """
    alone = 0.0
    together: dict[str, float] = defaultdict(float)
    for work in dict.fromkeys((*above, *below)):
        share = (above[work][0] if work in above else 0.0) - (below[work][0] if work in below else 0.0)
        latency = (above.get(work) or below[work])[1]
        part = share * log(latency.high_us / latency.low_us) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(WIDER * sqrt((1 - common) * alone + common * shared))
