"""Computes order statistics of timing samples: median and its interval, quantiles, noise, outliers.

Timers tick: with a timer that ticks every 0.5 µs, a kernel of 12.2 µs reads 12.0 or 12.5 µs, and
the median of such samples moves in steps of 4 %. But a sample starts at a random moment between two
ticks, so the fraction of samples on each tick shows the time between the ticks. `typical_us` is the
median with this interpolation.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from statistics import NormalDist

# scipy.stats is not used because it takes 0.8 s to import.
import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

Samples = Sequence[float] | npt.NDArray[np.float64]

#: Default confidence of intervals.
CONFIDENCE = 0.95

# Distance from the quartiles, in interquartile ranges, beyond which a value is "far out". Source:
# Tukey, Exploratory Data Analysis, 1977, ch. 2.
_FAR_OUT = 3.0

# Standard deviation of a normal distribution divided by its median absolute deviation: 1 / Φ⁻¹(3/4)
# = 1.4826.
_SIGMA_PER_MAD = 1.0 / NormalDist().inv_cdf(0.75)

# Maximum relative difference that float rounding may cause (float32 milliseconds: 6e-8).
_SAME = 1e-6

# Maximum difference that rounding may cause. Timers in use tick at most once per ns, so a
# difference above half a ns is not rounding.
_LARGEST_ROUNDING_US = 0.0005

# Maximum tick of timers in use (CUDA events: 0.5 to 1.024 µs). Larger steps between samples
# separate modes or outliers.
_COARSEST_TICK_US = 2.0


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a median.

    low, high: bounds, in the samples' unit.
    coverage: actual confidence, which is below the requested confidence for too few samples.
    """

    low: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, in the samples' unit."""
        return (self.high - self.low) / 2


def _array(samples: Samples, who: str) -> npt.NDArray[np.float64]:
    """Returns the samples as an array. Raises InputError if there are none or one is not finite.

    who: name of the operation, for error messages.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        expected = "a one-dimensional array of at least one sample"
        raise InputError(who, f"samples of shape {values.shape}", expected)
    if not np.isfinite(values).all():
        raise InputError(who, f"a sample of {values[~np.isfinite(values)][0]}", "finite numbers")
    return values


def median(samples: Samples) -> float:
    """Returns the median. For an even count, it is the mean of the two middle samples.

    >>> median([3.0, 1.0, 2.0])
    2.0
    """
    return float(np.median(_array(samples, "median")))


@lru_cache(maxsize=4096)
def median_ranks(count: int, confidence: float = CONFIDENCE) -> tuple[int, int, float]:
    """Returns the ranks of two samples that enclose the median, and the probability that they do.

    Ranks count from 1 in ascending order. For any continuous distribution, the interval from the
    r-th smallest to the r-th largest of n independent samples misses the median with probability
    2·P(B ≤ r − 1), where B is binomial(n, ½). The result has the largest r that keeps the
    confidence, or r = 1. With fewer than 6 samples, even r = 1 does not reach 95 %.
    Source: H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed. (2003), section 7.1.

    count: number of samples.

    >>> low, high, coverage = median_ranks(10)
    >>> low, high, round(coverage, 3)
    (2, 9, 0.979)
    """
    if count < 1:
        raise InputError("median_ranks", f"count = {count}", "at least one sample")
    if not 0 < confidence < 1:
        raise InputError("median_ranks", f"confidence = {confidence!r}", "a share between 0 and 1")
    # The coverage falls with increasing rank, and is 0 from the middle rank on.
    first_below = bisect_left(
        range(1, count), True, key=lambda rank: _coverage(count, rank) < confidence
    )
    rank = max(1, first_below)
    return rank, count + 1 - rank, _coverage(count, rank)


def normal_quantile(confidence: float = CONFIDENCE) -> float:
    """Returns the two-sided normal quantile, such as 1.96 for a confidence of 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _coverage(count: int, rank: int) -> float:
    """Returns the probability that the rank-th smallest and largest samples enclose the median."""
    from scipy import special

    return max(0.0, 1.0 - 2.0 * float(special.bdtr(rank - 1, count, 0.5)))


def median_interval(samples: Samples, confidence: float = CONFIDENCE) -> Interval:
    """Returns a distribution-free confidence interval of the median.

    The interval's bounds are two of the samples (see `median_ranks`).

    >>> median_interval(range(1, 11)).low, median_interval(range(1, 11)).high
    (2.0, 9.0)
    """
    values = _array(samples, "median_interval")
    low, high, coverage = median_ranks(values.size, confidence)
    ordered = np.partition(values, (low - 1, high - 1))
    return Interval(float(ordered[low - 1]), float(ordered[high - 1]), coverage)


def typical_us(samples_us: Samples) -> float:
    """Returns the median of times, interpolated between the timer's ticks.

    The result is the median of the mid-distribution, in which half of the samples on a tick count
    as below the tick. For samples on two neighbouring ticks, the result is the samples' mean, which
    is unbiased. Without ties, it is the ordinary median.
    Source: Y. Ma, M. Genton and E. Parzen, Asymptotic properties of sample quantiles of discrete
    distributions, Annals of the Institute of Statistical Mathematics 63 (2011).

    >>> typical_us([12.0, 12.0, 12.0, 12.5]), typical_us([12.0, 12.1, 12.4])
    (12.125, 12.1)
    """
    values = _array(samples_us, "typical_us")
    middle = float(np.median(values))
    step = _fine_tick(values)
    # Samples that differ by less than a quarter of a tick are on the same tick.
    near = step / 4
    excess = np.count_nonzero(values > middle + near) - np.count_nonzero(values < middle - near)
    if not step or not excess:
        return middle
    toward = step if excess > 0 else -step
    on_middle = np.count_nonzero(np.abs(values - middle) <= near)
    tied = on_middle + np.count_nonzero(np.abs(values - (middle + toward)) <= near)
    return float(middle + toward * abs(excess) / tied)


def untied(samples_us: Samples) -> npt.NDArray[np.float64]:
    """Returns the samples in ascending order, with the samples on each tick spread evenly.

    The samples on a tick are spread from the previous tick to the next. With spread samples, a rank
    test of two sets can find a shift that is not a whole number of ticks.

    >>> untied([12.0, 12.5, 12.0]).tolist()
    [11.75, 12.25, 12.5]
    """
    ordered = np.sort(_array(samples_us, "untied"))
    first = np.searchsorted(ordered, ordered, "left")
    end = np.searchsorted(ordered, ordered, "right")
    rank = np.arange(ordered.size) - first
    return np.asarray(ordered + _fine_tick(ordered) * ((2 * rank + 1) / (end - first) - 1))


def typical_interval(
    samples_us: Samples, confidence: float = CONFIDENCE, tick_us: float = 0.0
) -> Interval:
    """Returns a confidence interval of `typical_us`.

    Usually, this is the median's interval. If that interval spans fewer ticks than samples, its
    width is a whole number of ticks and too coarse. The result is then the interval of Huber's
    estimator with a limit of one tick. The estimator's standard error follows from the samples
    within a tick of the typical time. As in Agresti and Coull's interval of a proportion, z²/2 is
    added to the sum of squares, because equal samples do not mean that the time is exactly on the
    tick. Steps above 2 µs are not ticks. For them, the half-width is at least half a step.

    tick_us: resolution of the timer in µs, which is used if all samples are equal.

    >>> equal = typical_interval([12.0] * 40, tick_us=0.5)
    >>> round(equal.low, 2), round(equal.high, 2)
    (11.97, 12.03)
    """
    values = _array(samples_us, "typical_interval")
    interval = median_interval(values, confidence)
    low, high, _ = median_ranks(values.size, confidence)
    step = tick(values) or tick_us
    width = interval.high - interval.low
    if not step or not _on_ticks(width, step, high - low):
        return interval
    middle = typical_us(values)
    half = max(width, step) / 2
    if step <= _COARSEST_TICK_US:
        limited = np.clip((values - middle) / step, -1, 1)
        within = max(1, int(np.count_nonzero(np.abs(values - middle) < step)))
        z = normal_quantile(confidence)
        squares = float(np.sum(limited**2) + z**2 / 2)
        half = min(width / 2 + step, step * z * squares**0.5 / within)
    return Interval(middle - half, middle + half, interval.coverage)


def _on_ticks(width: float, step: float, ranks: float) -> bool:
    """Returns whether some of the samples between two ranks share a tick.

    If each sample had a separate tick, the samples would span at least one tick per rank. Half a
    rank is subtracted because of rounding.

    width: difference between the samples at the two ranks.
    step: distance between ticks.
    ranks: difference between the ranks.
    """
    return width < step * (ranks - 0.5)


def relative_half_width(
    samples_us: Samples, confidence: float = CONFIDENCE, tick_us: float = 0.0
) -> float:
    """Returns the half-width of `typical_interval`, relative to `typical_us`.

    The result is infinite if there are too few samples for the confidence (fewer than 6 for 95 %),
    or if `typical_us` is not positive.

    tick_us: resolution of the timer in µs, which is used if all samples are equal.

    >>> relative_half_width([10.0] * 10), round(relative_half_width([10.0] * 10, tick_us=0.5), 3)
    (0.0, 0.014)
    """
    values = _array(samples_us, "relative_half_width")
    interval = typical_interval(values, confidence, tick_us)
    middle = typical_us(values)
    if interval.coverage < confidence or middle <= 0:
        return inf
    return interval.half_width / middle


def quantiles(samples: Samples, shares: Sequence[float]) -> tuple[float, ...]:
    """Returns linearly interpolated quantiles.

    shares: fraction of the samples below each quantile, 0 to 1.

    >>> quantiles([1.0, 2.0, 3.0, 4.0, 5.0], (0.25, 0.5, 0.75))
    (2.0, 3.0, 4.0)
    """
    if any(not 0 <= share <= 1 for share in shares):
        raise InputError("quantiles", f"shares = {tuple(shares)!r}", "shares between 0 and 1")
    return tuple(float(q) for q in np.quantile(_array(samples, "quantiles"), shares))


def spread(samples: Samples) -> float:
    """Returns (90 % quantile − 10 % quantile) / median.

    If samples share timer ticks, one tick is subtracted from the difference of the quantiles,
    because rounding to ticks widens the difference by up to a tick.
    """
    low, middle, high = quantiles(samples, (0.1, 0.5, 0.9))
    width = high - low
    step = _fine_tick(samples)
    # 80 % of the ranks are between the two quantiles.
    if _on_ticks(width, step, 0.8 * (len(samples) - 1)):
        width = max(0.0, width - step)
    return width / middle if middle > 0 else inf


def outlier_fraction(samples: Samples) -> float:
    """Returns the fraction of samples that are "far out" (Tukey).

    A sample is far out if it is more than 3 interquartile ranges outside the quartiles. If the
    interquartile range is below one timer tick, the tick is used instead.

    >>> outlier_fraction([10.0, 10.1, 10.2, 10.1, 10.0, 10.2, 10.1, 30.0])
    0.125
    """
    values = _array(samples, "outlier_fraction")
    first, third = quantiles(values, (0.25, 0.75))
    reach = _FAR_OUT * max(third - first, _fine_tick(values))
    return float(np.mean((values < first - reach) | (values > third + reach)))


def noise(samples: Samples) -> float:
    """Returns the robust relative standard deviation, 1.4826 · median absolute deviation / median.

    A few disturbed samples change the result little. If most samples are on one tick, the median
    absolute deviation is 0. The result is therefore at least the root mean square of the deviations
    from the median, each limited to one tick.

    >>> round(noise([9.0, 10.0, 11.0, 10.0, 9.0, 11.0, 500.0]), 4)
    0.1483
    """
    values = _array(samples, "noise")
    middle = float(np.median(values))
    step = _fine_tick(values)
    if middle <= 0:
        return inf
    deviations = np.abs(values - middle)
    limited = float(np.sqrt(np.mean(np.minimum(deviations, step) ** 2)))
    return max(_SIGMA_PER_MAD * float(np.median(deviations)), limited) / middle


def tick(samples: Samples) -> float:
    """Returns the smallest step between two different samples, an estimate of the timer's tick.

    The result is 0 if all samples are equal. For a coarse timer, a few samples suffice to show the
    tick. For a fine timer, the result is far below the noise.

    >>> tick([10.24, 11.264, 12.288, 10.24])
    1.024
    """
    ordered = np.sort(_array(samples, "tick"))
    steps = np.diff(ordered)
    rounding = min(_SAME * max(abs(ordered[0]), abs(ordered[-1])), _LARGEST_ROUNDING_US)
    steps = steps[steps > rounding]
    return round(float(steps.min()), 6) if steps.size else 0.0


def _fine_tick(samples: Samples) -> float:
    """Returns `tick`, or 0 if it is larger than the tick of any timer in use."""
    step = tick(samples)
    return step if step <= _COARSEST_TICK_US else 0.0
