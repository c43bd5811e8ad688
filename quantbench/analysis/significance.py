"""Tests whether two sets of times differ by more than a tolerance, and estimates a run's noise.

The noise comes from reference points, which are measured again and again during a run. `compare`
uses the test (`rank_test`) and the noise and drift of two runs (`wander`). `curves` uses the noise
of one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, log, sqrt

import numpy as np
import numpy.typing as npt

from quantbench.stats import CONFIDENCE, median, noise, normal_quantile, untied
from quantbench.store.folder import Run
from quantbench.store.record import Measured, Record

FloatArray = npt.NDArray[np.float64]

# Maximum number of samples, both sides together, for which the exact distribution of the rank sum
# is used. With more samples, the normal approximation is as good, and conservative in its far
# tails.
_EXACT_UP_TO = 60
# If a side has more samples than this, it is reduced to this many quantiles before the pairwise
# ratios are computed. The interval moves by less than one rank.
_MOST_RANKS = 400


@dataclass(frozen=True)
class RatioTest:
    """Result of testing the times of side b against the times of side a.

    ratio: median of b's times / a's times, over all pairs of samples.
    low, high: 95 % interval of the ratio; None if there are too few samples.
    p: two-sided p-value; a small value means that the times differ by more than the tolerance. It
        is 1 if there are too few samples.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float


def rank_test(a_us: Sequence[float], b_us: Sequence[float], tolerance: float) -> RatioTest:
    """Tests whether the times of sides a and b differ by more than a tolerance (Mann-Whitney test).

    a_us, b_us: samples of the two sides, in µs.
    tolerance: relative change that is allowed. With 0.01, times differ if their ratio is over 1.01
        or under 1/1.01.

    >>> a_us = [10.0, 10.1, 9.9, 10.2, 9.8, 10.05]
    >>> b_us = [12.0, 12.1, 11.9, 12.2, 11.8, 12.05]
    >>> test = rank_test(a_us, b_us, 0.01)
    >>> round(test.ratio, 2), test.p < 0.01
    (1.2, True)
    """
    a = untied(a_us)
    b = untied(b_us)
    ratio, low, high = _ratio_interval(a, b)
    if low is None or high is None:
        return RatioTest(ratio, None, None, 1.0)
    slower = _p_greater(b, a * (1 + tolerance))
    faster = _p_greater(a, b * (1 + tolerance))
    p = min(1.0, 2 * min(slower, faster))
    return RatioTest(ratio, low, high, p)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Returns Holm's adjusted p-values, which correct for the number of tests.

    If a change is reported for each test with an adjusted p-value below α, the probability of any
    false report is at most α.

    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)
    """
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return tuple(adjusted)


def _p_greater(large: FloatArray, small: FloatArray) -> float:
    """Returns the one-sided p-value; a small value means that `large` is greater than `small`."""
    from scipy.stats import mannwhitneyu

    both = np.concatenate((large, small))
    exact = both.size <= _EXACT_UP_TO and np.unique(both).size == both.size
    method = "exact" if exact else "asymptotic"
    result = mannwhitneyu(large, small, alternative="greater", method=method)
    # If all values are equal, the test returns NaN, and there is no evidence for a difference.
    return 1.0 if np.isnan(result.pvalue) else float(result.pvalue)


def _ratio_interval(a: FloatArray, b: FloatArray) -> tuple[float, float | None, float | None]:
    """Returns the median of all pairwise ratios b / a and its 95 % interval.

    Returns None for the bounds if there are too few samples.
    """
    pairs = a.size * b.size
    ratios = np.sort((_thinned(b)[:, None] / _thinned(a)[None, :]).ravel())
    ratio = float(np.median(ratios))
    z = normal_quantile()
    # Rank of the interval's lower bound among all pairwise ratios. Inverting the rank test gives
    # it.
    rank = int(pairs / 2 - z * (pairs * (a.size + b.size + 1) / 12) ** 0.5)
    if rank < 1:
        return ratio, None, None
    index = int((rank - 1) / pairs * ratios.size)
    return ratio, float(ratios[index]), float(ratios[ratios.size - 1 - index])


def _thinned(samples: FloatArray) -> FloatArray:
    """Returns at most _MOST_RANKS quantiles in place of the samples."""
    if samples.size <= _MOST_RANKS:
        return samples
    shares = (np.arange(_MOST_RANKS) + 0.5) / _MOST_RANKS
    thinned: FloatArray = np.quantile(samples, shares)
    return thinned


# Minimum number of measurements of reference points from which their noise is estimated.
_FEWEST = 4


@dataclass(frozen=True)
class Wander:
    """Noise and drift of the reference points in two runs.

    repeats_a, repeats_b: number of measurements of reference points in each run.
    noise_a, noise_b: relative standard deviation of a reference point's median time between
        repetitions, in each run. If either run has too few repetitions, both are estimated from the
        two runs together. A value is None if it cannot be estimated.
    allowance: largest relative change that noise alone explains. If nothing changed, the changes of
        all compared points stay below it with 95 % probability.
    shift: ratio b / a of the reference times; None if the runs have no common reference point.
    """

    repeats_a: int
    repeats_b: int
    noise_a: float | None
    noise_b: float | None
    allowance: float
    shift: float | None


def wander(a: Run, b: Run, points: int) -> Wander:
    """Computes the noise and drift of the reference points in two runs.

    points: number of points that the comparison of the runs covers.
    """
    of_a = reference_medians(a.records)
    of_b = reference_medians(b.records)
    noise_a = reference_noise(of_a)
    noise_b = reference_noise(of_b)
    shift = None
    common = of_a.keys() & of_b.keys()
    if common:  # a run of several devices has several reference points
        shift = median([median(of_b[key]) / median(of_a[key]) for key in common])
    # The confidence is raised so that it covers the largest change among all points (Bonferroni's
    # correction). If there are few repetitions, the noise itself is uncertain, so Student's t
    # replaces the normal quantile.
    confidence = 1 - (1 - CONFIDENCE) / max(points, 1)
    z = normal_quantile(confidence)
    if noise_a is None or noise_b is None:
        pooled, freedom = pooled_noise((*of_a.values(), *of_b.values()))
        if freedom:
            from scipy import special

            noise_a = noise_b = pooled
            z = float(special.stdtrit(freedom, (1 + confidence) / 2))
    allowance = exp(z * hypot(noise_a or 0.0, noise_b or 0.0)) - 1
    repeats_a = sum(map(len, of_a.values()))
    repeats_b = sum(map(len, of_b.values()))
    return Wander(repeats_a, repeats_b, noise_a, noise_b, allowance, shift)


def reference_medians(records: Iterable[Record]) -> dict[str, list[float]]:
    """Returns the median time in µs of each measurement of a reference point, by key.

    The order is that of the records. A run on several devices has several reference points.
    """
    found: dict[str, list[float]] = {}
    for record in records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            found.setdefault(record.key, []).append(record.outcome.measurement.stated.latency_us)
    return found


def pooled_noise(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Returns the relative standard deviation around the groups' means, pooled over all groups.

    The second value is the number of degrees of freedom. Returns (0, 0) if no group has more than
    one value.
    """
    freedom = 0
    squares = 0.0
    for group in groups:
        logs = np.log(group)
        freedom += len(logs) - 1
        squares += float(((logs - logs.mean()) ** 2).sum())
    return (sqrt(squares / freedom) if freedom else 0.0), freedom


def reference_noise(medians_us: dict[str, list[float]]) -> float | None:
    """Returns the robust relative standard deviation between repetitions of a reference point.

    The times of each reference point are compared with the median of that point, and all reference
    points are pooled. Returns None if there are too few repetitions.

    medians_us: result of `reference_medians`.
    """
    ratios: list[float] = []
    for of_key in medians_us.values():
        if len(of_key) > 1:
            middle_us = median(of_key)
            ratios += [1 + log(us / middle_us) for us in of_key]
    return noise(ratios) if len(ratios) >= _FEWEST else None
