"""Computes order statistics of timing samples: median and its interval, quantiles, noise, outliers.

Entry points: `median`, `median_interval`, `quantiles`, `noise`, `spread`, `relative_half_width`, `outlier_share`,
`normal_quantile`, and the type `Interval`. Used by `timing`, `sweep`, `analysis`, `cluster`, `comm`, `importers`,
`profile`, `report` and the command `comm`.

Kernel times are skewed (disturbances only make them longer) and sometimes bimodal, so means and standard deviations
mislead. Relative results are shares of the median (0.005 is 0.5 %). scipy.stats is avoided: it takes 0.8 s to import.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

Samples = Sequence[float] | npt.NDArray[np.float64]

#: default confidence of intervals of a median
CONFIDENCE = 0.95

# Tukey (Exploratory Data Analysis, 1977, ch. 2) calls what lies beyond 3 interquartile ranges "far out".
_FAR_OUT = 3.0

# Standard deviations per median absolute deviation for a normal distribution: 1 / Φ⁻¹(3/4) = 1.4826.
_SIGMA_PER_MAD = 1.0 / NormalDist().inv_cdf(0.75)

# Event times are whole nanoseconds at the finest; values closer than this differ by float rounding, not by time.
_SAME_TIME_US = 1e-4


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a median.

    low, high: bounds in the unit of the samples.
    coverage: actual confidence, below the requested one if there are too few samples.
    """

    low: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, in the unit of the samples."""
        return (self.high - self.low) / 2


def _array(samples: Samples, who: str) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise InputError(who, f"samples of shape {values.shape}", "a one-dimensional array of at least one sample")
    if not np.isfinite(values).all():
        raise InputError(who, f"a sample of {values[~np.isfinite(values)][0]}", "finite numbers")
    return values


def median(samples: Samples) -> float:
    """Returns the median (mean of the middle two for an even count).

    >>> median([3.0, 1.0, 2.0])
    2.0
    """
    return float(np.median(_array(samples, "median")))


@lru_cache(maxsize=4096)
def median_ranks(count: int, confidence: float = CONFIDENCE) -> tuple[int, int, float]:
    """Returns the ranks (1-based) of the order statistics that enclose the median, and their coverage.

    For any continuous distribution the interval from the r-th smallest to the r-th largest of n independent samples
    misses the median with probability 2·P(B ≤ r − 1), B binomial(n, ½). Takes the largest r that keeps the confidence;
    with fewer than 6 samples even r = 1 does not reach 95 %.
    Source: H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed. (2003), section 7.1.

    >>> low, high, coverage = median_ranks(10)
    >>> low, high, round(coverage, 3)
    (2, 9, 0.979)
    """
    if count < 1:
        raise InputError("median_ranks", f"count = {count}", "at least one sample")
    if not 0 < confidence < 1:
        raise InputError("median_ranks", f"confidence = {confidence!r}", "a share between 0 and 1")
    # The coverage falls with the rank, to 0 from the middle on.
    rank = max(1, bisect_left(range(1, count), True, key=lambda r: _coverage(count, r) < confidence))
    return rank, count + 1 - rank, _coverage(count, rank)


def normal_quantile(confidence: float = CONFIDENCE) -> float:
    """Returns the two-sided normal quantile: 1.96 standard deviations for a confidence of 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _coverage(count: int, rank: int) -> float:
    from scipy import special

    return max(0.0, 1.0 - 2.0 * float(special.bdtr(rank - 1, count, 0.5)))


def median_interval(samples: Samples, confidence: float = CONFIDENCE) -> Interval:
    """Returns a distribution-free confidence interval of the median, from two order statistics (see `median_ranks`).

    >>> median_interval(range(1, 11)).low, median_interval(range(1, 11)).high
    (2.0, 9.0)
    """
    values = _array(samples, "median_interval")
    low, high, coverage = median_ranks(values.size, confidence)
    ordered = np.partition(values, (low - 1, high - 1))
    return Interval(float(ordered[low - 1]), float(ordered[high - 1]), coverage)


def relative_half_width(samples: Samples, confidence: float = CONFIDENCE, tick_us: float = 0.0) -> float:
    """Returns the half-width of the median's confidence interval as a share of the median.

    tick_us: resolution of the clock; the half-width is at least half a tick.
    Returns infinity if there are too few samples for the confidence (6 for 95 %) or the median is not positive.

    >>> relative_half_width([10.0] * 10), relative_half_width([10.0] * 10, tick_us=0.5)
    (0.0, 0.025)
    """
    values = _array(samples, "relative_half_width")
    interval = median_interval(values, confidence)
    middle = float(np.median(values))
    if interval.coverage < confidence or middle <= 0:
        return float("inf")
    return max(interval.half_width, tick_us / 2) / middle


def quantiles(samples: Samples, shares: Sequence[float]) -> tuple[float, ...]:
    """Returns the linearly interpolated quantiles at these shares (0 to 1).

    >>> quantiles([1.0, 2.0, 3.0, 4.0, 5.0], (0.25, 0.5, 0.75))
    (2.0, 3.0, 4.0)
    """
    if any(not 0 <= share <= 1 for share in shares):
        raise InputError("quantiles", f"shares = {tuple(shares)!r}", "shares between 0 and 1")
    return tuple(float(q) for q in np.quantile(_array(samples, "quantiles"), shares))


def spread(samples: Samples) -> float:
    """Returns (90 % quantile − 10 % quantile) / median."""
    low, middle, high = quantiles(samples, (0.1, 0.5, 0.9))
    return (high - low) / middle if middle > 0 else float("inf")


def outlier_share(samples: Samples) -> float:
    """Returns the share of samples more than 3 interquartile ranges outside the quartiles (Tukey's "far out").

    >>> outlier_share([10.0, 10.1, 10.2, 10.1, 10.0, 10.2, 10.1, 30.0])
    0.125
    """
    values = _array(samples, "outlier_share")
    first, third = quantiles(values, (0.25, 0.75))
    reach = _FAR_OUT * (third - first)
    return float(np.mean((values < first - reach) | (values > third + reach)))


def noise(samples: Samples) -> float:
    """Returns the robust relative standard deviation, 1.4826 · median absolute deviation / median.

    A few disturbed samples change it little.

    >>> round(noise([9.0, 10.0, 11.0, 10.0, 9.0, 11.0, 500.0]), 4)
    0.1483
    """
    values = _array(samples, "noise")
    middle = float(np.median(values))
    if middle <= 0:
        return float("inf")
    return _SIGMA_PER_MAD * float(np.median(np.abs(values - middle))) / middle


def tick(samples: Samples) -> float:
    """Returns the clock's resolution: the smallest step between two different samples; 0 if all are equal.

    For a coarse clock, a few samples show its tick; for a fine one the result is far below the noise.

    >>> tick([10.24, 11.264, 12.288, 10.24])
    1.024
    """
    steps = np.diff(np.sort(_array(samples, "tick")))
    steps = steps[steps > _SAME_TIME_US]
    return round(float(steps.min()), 6) if steps.size else 0.0
