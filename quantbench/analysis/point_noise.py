"""Standard error of each point's log time: `standard_errors`, from a run's `repeatability`. Called by `curve_fits`.

It has three parts: the scatter of the point's own samples over the root of their number; the scatter from point to
point beyond the samples (memory placement, clock), which the repeated reference point shows; and, for tables with one
figure per point, the scatter between sizes so close that the work is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, sqrt

import numpy as np
import numpy.typing as npt

from quantbench.analysis.curves import Curve
from quantbench.stats import median, noise
from quantbench.store.record import Measured, Record

Floats = npt.NDArray[np.float64]

#: the standard error of a median over that of a mean, for a normal distribution: √(π/2).
MEDIAN_FACTOR = sqrt(np.pi / 2)
#: two measurements of one point agree no better than this on a quiet GPU, whatever their samples say.
LEAST_ERROR = 0.002
# Of a curve's single figures nothing is known when too few of them lie close together; published tables repeat within
# 1 to 3 % (aiconfigurator-core, row to row where the work is the same).
_UNKNOWN_ERROR = 0.03
# A point with fewer samples borrows the noise of its neighbours.
_OWN_SAMPLES = 10
# The median absolute deviation of few samples is too small on average; factors for 2 … 9 samples, and n / (n − 0.8) for
# more, from Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale" (COMPSTAT 1992).
_FEW_SAMPLES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
_FEWEST_REFERENCES = 4
# Sizes this close in log size are near enough to ask how well figures repeat.
_CLOSE = 0.02
_FEWEST_CLOSE = 8
# |difference| of two normal figures over the standard deviation of one: its median, √2 · Φ⁻¹(3/4), and its lower
# quartile, √2 · Φ⁻¹(5/8).
_MEDIAN_PER_SIGMA = sqrt(2) * 0.674490
_QUARTILE_PER_SIGMA = sqrt(2) * 0.318639


def repeatability(records: Iterable[Record]) -> float:
    """Relative standard deviation between repetitions of the run's reference points.

    Where there are too few, the smallest known of any device. A run of many devices has several references; differences
    between its devices count.
    """
    medians_us: dict[str, list[float]] = {}
    for record in records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            medians_us.setdefault(record.key, []).append(median(record.outcome.measurement.samples_us))
    ratios = [1 + log(us / median(of_key)) for of_key in medians_us.values() if len(of_key) > 1 for us in of_key]
    return max(LEAST_ERROR, noise(ratios)) if len(ratios) >= _FEWEST_REFERENCES else LEAST_ERROR


def standard_errors(curves: Sequence[Curve], between: float) -> list[Floats]:
    """The standard error of each point's log time, for each curve (points,).

    between: what `repeatability` found. Curves of one family share what they know about single figures.
    """
    figures = _errors_of_figures(curves)
    return [_errors(curve, between, figures[curve.family]) for curve in curves]


def _errors(curve: Curve, between: float, figure_error: float) -> Floats:
    if all(point.num_samples == 1 for point in curve.points):  # most curves of imported tables
        return np.full(len(curve.points), sqrt(between**2 + figure_error**2))
    count = np.array([point.num_samples for point in curve.points], dtype=np.float64)
    own = np.array([point.noise * _small_sample_factor(point.num_samples) for point in curve.points])
    several = count >= 3
    shared = float(np.mean(own[several])) if several.any() else 0.0
    known = np.minimum(count, _OWN_SAMPLES) / _OWN_SAMPLES
    scatter = np.where(several, np.sqrt(known * own**2 + (1 - known) * shared**2), shared)
    errors = np.sqrt((MEDIAN_FACTOR * scatter) ** 2 / count + between**2)
    return errors if several.any() else np.sqrt(errors**2 + figure_error**2 / count)


def _small_sample_factor(samples: int) -> float:
    return _FEW_SAMPLES.get(samples, samples / (samples - 0.8))


def _errors_of_figures(curves: Sequence[Curve]) -> dict[tuple[str, str, str], float]:
    """By family: the standard error of a single figure, from pairs of close sizes.

    Steps go up: where the larger of two close sizes took less time, it was noise, and as often as not. Where a slope
    leaves too few such pairs, the lower quartile of all is taken: up to half of them may have a step between them.
    """
    differences: dict[tuple[str, str, str], list[Floats]] = {}
    for curve in curves:
        close = np.diff(curve.log_size) < _CLOSE
        differences.setdefault(curve.family, []).append(np.diff(curve.log_time)[close])
    found = {}
    for family, parts in differences.items():
        pooled = np.concatenate(parts)
        falls = pooled[pooled < 0]
        if len(falls) >= _FEWEST_CLOSE:
            found[family] = float(np.median(-falls)) / _MEDIAN_PER_SIGMA
        elif len(pooled) >= _FEWEST_CLOSE:
            found[family] = float(np.quantile(np.abs(pooled), 0.25)) / _QUARTILE_PER_SIGMA
        else:
            found[family] = _UNKNOWN_ERROR
    return found
