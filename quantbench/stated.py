"""Computes a point's time at the mean SM clock, with its interval, from samples and clocks.

The SM clock varies, and a point's samples cover only a moment of the variation. `stated` corrects
the samples to the mean clock of a longer time (see `timing.mean_clock`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, isinf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantbench.stats import (
    CONFIDENCE,
    Interval,
    normal_quantile,
    relative_half_width,
    tick,
    typical_interval,
    typical_us,
)

Times = npt.NDArray[np.float64]

# Minimum number of samples, and minimum relative range of their SM clocks, for an estimate of the
# clock's effect on the times. Otherwise, the exponent (see `stated`) may be anything from 0 to 1.
_FEWEST_FOR_EXPONENT = 10
_LEAST_MOVE = 1e-4


class Mean(Protocol):
    """Mean clock and the half-width of its 95 % interval, such as `measurement.MeanClock`."""

    @property
    def mhz(self) -> float: ...
    @property
    def half_width_mhz(self) -> float: ...


@dataclass(frozen=True)
class Stated:
    """Time of one point at its mean clock.

    times_us: the samples, each scaled to the mean clock.
    latency_us: time at the mean clock: `stats.typical_us` of the scaled samples.
    interval: 95 % interval of latency_us.
    sampling: portion of the relative half-width that more samples narrow. It comes from the
        samples' scatter and the exponent's uncertainty (see `stated`). It is infinite if there are
        too few samples for an interval.
    clock: portion of the relative half-width in addition to the samples' scatter. It comes from the
        uncertainties of the mean clock and of the exponent.
    """

    times_us: Sequence[float]
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
    samples_us: Sequence[float],
    clocks_mhz: Sequence[float],
    mean: Mean | None,
    tick_us: float = 0.0,
) -> Stated:
    """Returns the time at the mean clock, estimated from the samples.

    A time is proportional to clock^-e. The exponent e is 1 for work that the SMs limit, and 0 for
    work that the memory limits. A regression of the samples on their clocks gives an interval of e
    between 0 and 1. Without clocks, the samples are not scaled.

    samples_us: times of single runs, in µs.
    clocks_mhz: SM clock at each sample; empty if it is unknown.
    mean: mean SM clock; None if it is unknown.
    tick_us: resolution of the samples in µs, which is used if all samples are equal.
    """
    if len(samples_us) == 1:  # a short cut for large tables of single times
        return Stated(samples_us, samples_us[0], Interval(samples_us[0], samples_us[0], 0.0), inf)
    if mean is None or not clocks_mhz:
        interval = typical_interval(samples_us, tick_us=tick_us)
        width = relative_half_width(samples_us, tick_us=tick_us)
        return Stated(samples_us, typical_us(samples_us), interval, width)
    raw_us = np.asarray(samples_us, dtype=np.float64)
    logs = np.log(np.asarray(clocks_mhz, dtype=np.float64) / mean.mhz)
    low, high = _exponent(raw_us, logs)
    times_us = _scaled(raw_us, logs * (low + high) / 2)
    latency_us = typical_us(times_us)
    interval = typical_interval(times_us, tick_us=tick_us)
    half = interval.half_width / latency_us
    from_exponent = abs(float(logs.mean())) * (high - low) / 2
    from_mean = high * mean.half_width_mhz / mean.mhz
    clock = hypot(half, from_mean) - half + from_exponent
    sampling = half + from_exponent if interval.coverage >= CONFIDENCE else inf
    wider_us = clock * latency_us
    interval = Interval(interval.low - wider_us, interval.high + wider_us, interval.coverage)
    return Stated(times_us.tolist(), latency_us, interval, sampling, clock)


def _exponent(times_us: Times, log_clocks: Times) -> tuple[float, float]:
    """Returns the 95 % interval of the exponent e in time ~ clock^-e, limited to 0 … 1.

    log_clocks: natural logarithm of each sample's clock relative to the mean clock.
    """
    if len(log_clocks) < _FEWEST_FOR_EXPONENT or np.ptp(log_clocks) < _LEAST_MOVE:
        return 0.0, 1.0
    x = log_clocks - log_clocks.mean()
    squares = float(x @ x)
    y = np.log(times_us)
    y -= y.mean()
    exponent = -float(x @ y) / squares
    rest = y + exponent * x
    half = normal_quantile() * (float(rest @ rest) / (len(x) - 2) / squares) ** 0.5
    low, high = np.clip((exponent - half, exponent + half), 0.0, 1.0)
    return float(low), float(high)


def _scaled(times_us: Times, logs: Times) -> Times:
    """Returns times · exp(logs).

    If the scaling would spread the samples by less than a timer tick, all samples are scaled by the
    mean factor. Samples on one tick then stay on one tick, so that `typical_us` still recognises
    the ticks.
    """
    if float(np.ptp(logs) * times_us.mean()) < tick(times_us):
        logs = logs.mean()
    scaled: Times = times_us * np.exp(logs)
    return scaled
