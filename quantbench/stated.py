"""Computes a point's time from its samples, with an interval that later measurements fall into.

On a GPU, the SM clock depends on the power that the work draws, and hardly moves while one point is
sampled. When the same work is measured again later, the clock has settled elsewhere: the further
the power limit has lowered it, the further away. The samples of one visit cannot show this, so it
widens the interval (docs/evidence.md has the measurements behind it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, isinf

from quantbench.stats import (
    Interval,
    median,
    relative_half_width,
    typical_interval,
    typical_us,
)

#: Step of NVIDIA's SM clocks, in MHz: `nvidia-smi --query-supported-clocks=graphics` lists the
#: clocks of an H200 15 MHz apart.
CLOCK_STEP_MHZ = 15.0
# Unknown part of the clock that the power limit takes. With it, 95 % of the differences between two
# visits of 60 products on an H200 are within the intervals (docs/evidence.md).
_UNSURE_SHARE = 0.1


@dataclass(frozen=True)
class Stated:
    """Time of one point.

    latency_us: `stats.typical_us` of the samples.
    interval: 95 % interval of latency_us.
    sampling: relative half-width of the interval that follows from the samples' scatter; infinite
        if there are too few samples for an interval.
    clock: relative half-width that the SM clock adds, for work that follows the clock; 0 if the
        clock is unknown.
    """

    latency_us: float
    interval: Interval
    sampling: float
    clock: float = 0.0

    @property
    def relative_half_width(self) -> float:
        """Half-width of the interval, relative to latency_us; infinite for too few samples."""
        if isinf(self.sampling):
            return self.sampling
        return self.interval.half_width / self.latency_us


def stated(
    samples_us: Sequence[float], clocks_mhz: Sequence[float], highest_mhz: float | None = None
) -> Stated:
    """Returns the time that the samples show, and its interval.

    samples_us: times of single runs, in µs.
    clocks_mhz: SM clock at each sample; empty if it is unknown.
    highest_mhz: SM clock of work that draws little power; None for that of the samples.
    """
    if len(samples_us) == 1:  # a short cut for large tables of single times
        return Stated(samples_us[0], Interval(samples_us[0], samples_us[0], 0.0), inf)
    latency_us = typical_us(samples_us)
    interval = typical_interval(samples_us)
    sampling = relative_half_width(samples_us)
    if not clocks_mhz:
        return Stated(latency_us, interval, sampling)
    own_mhz = median(clocks_mhz)
    lost_mhz = max(0.0, (highest_mhz or own_mhz) - own_mhz)
    clock = max(CLOCK_STEP_MHZ, _UNSURE_SHARE * lost_mhz) / own_mhz
    half_us = interval.half_width
    wider_us = hypot(half_us, clock * latency_us) - half_us
    interval = Interval(interval.low - wider_us, interval.high + wider_us, interval.coverage)
    return Stated(latency_us, interval, sampling, clock)
