"""Groups points into curves along one axis, estimates their noise, and fits them piecewise.

A curve is the time of one op over the sizes of one axis, with all other axes fixed. The curves of
one op, provider and variant (such as dtype and layout) form a family. `fit_curves` finds the steps
of the curves, which `jumps` reports as cliffs.

The standard error of a point's log time combines two terms. The first is the error of the median,
from the point's own samples; for a single sample, it is estimated from the scatter between nearly
equal sizes. The second is the scatter between repeated measurements of the reference point. If the
points of a family scatter around their fits more than expected, its standard errors are scaled up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from math import sqrt
from operator import attrgetter
from statistics import mode
from typing import Any

import numpy as np

from quantbench.analysis.blocks import row_alignment_bytes
from quantbench.analysis.significance import pooled_noise, reference_medians, reference_noise
from quantbench.analysis.step_detection import (
    Floats,
    Pieces,
    PiecewiseFit,
    describe,
    find_pieces,
)
from quantbench.analysis.summary import Point, held_of
from quantbench.quantization import variant_words
from quantbench.store.record import Record
from quantbench.sweep.axes import SHAPE_DIM

#: (op, provider, variant), which all curves that are fitted and explained together have in common
Family = tuple[str, str, str]

#: largest distance between two neighbouring sizes, in log size (0.125 is 13 %), at which a step
#: between them can be distinguished from the trend
COARSE = 0.125

# Workload fields that are not sizes. The points of one curve agree in all of them.
_VARIANTS = ("dtype", "layout", "mask", "causal", "direction", "op", "distribution")


@dataclass(frozen=True)
class OfFamily:
    """Base class of curves, and of results about curves, along `axis`. Identifies their family.

    variant: workload kind and the values of all workload fields that are not sizes: `gemm bf16
        nt`.
    """

    axis: str
    op: str
    provider: str
    variant: str

    @property
    def family(self) -> Family:
        """Op, provider and variant."""
        return (self.op, self.provider, self.variant)


@dataclass(frozen=True)
class Curve(OfFamily):
    """Points of one op and provider along `axis`, one per size, in ascending order of size.

    held: (axis, value) of each other axis, which all points share.
    """

    held: tuple[tuple[str, int], ...]
    points: tuple[Point, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.axes[self.axis] for point in self.points)

    @cached_property
    def log_size(self) -> Floats:
        """Natural logarithm of the axis values (points,)."""
        return np.log(np.array(self.sizes, dtype=np.float64))

    @cached_property
    def close_gaps(self) -> tuple[int, ...]:
        """Indices of the points whose next neighbour is at most COARSE away in log size."""
        return tuple((self.log_size[1:] - self.log_size[:-1] <= COARSE).nonzero()[0].tolist())

    @cached_property
    def log_time(self) -> Floats:
        """Natural logarithm of the points' median times in µs (points,)."""
        return np.log(_column(self.points, "latency_us"))


def _column(points: Iterable[Point], name: str) -> Floats:
    """Returns the values of one field for all points (points,)."""
    return np.array(list(map(attrgetter(name), points)), dtype=np.float64)


@cache
def _variant_getter(kind: Any) -> attrgetter[tuple[object, ...]]:
    """Returns a getter for a workload's `kind` and its fields that are not sizes.

    kind: class of the workload.
    """
    names = {f.name for f in fields(kind)}
    return attrgetter("kind", *(name for name in _VARIANTS if name in names))


def curve_family(point: Point) -> Family:
    """Returns the op, provider and variant of a point (see `OfFamily`)."""
    kind: Any = type(point.workload)
    return (point.op, point.provider, " ".join(map(str, _variant_getter(kind)(point.workload))))


def curves_of(points: Iterable[Point], axis: str, *, fewest: int = 2) -> tuple[Curve, ...]:
    """Returns all curves along `axis` with at least `fewest` points, in order of first appearance.

    All points of a curve have the same timing mode. Times of different modes differ by 1 to 2.5 µs,
    which would look like a cliff. If several records have the same grid point, as in a table with
    one row per kernel, the fastest is used.
    """
    groups: dict[tuple[Any, ...], dict[int, Point]] = {}
    for point in points:
        size = point.axes.get(axis)
        if size is None:
            continue
        key = (*curve_family(point), held_of(point.axes, axis), point.mode)
        group = groups.setdefault(key, {})
        if size not in group or point.latency_us < group[size].latency_us:
            group[size] = point
    curves = []
    for (op, provider, variant, held, _), group in groups.items():
        if len(group) >= fewest:
            by_size = tuple(map(group.__getitem__, sorted(group)))
            curves.append(Curve(axis, op, provider, variant, held, by_size))
    return tuple(curves)


def main_variant(curve: Curve) -> Curve:
    """Returns the curve without points that differ from most others in more than their tiles.

    These are points that ran another compiled variant of the kernel that ran most points, and
    points whose rows are less aligned than those of most points.
    """
    main = mode(point.launch and replace(point.launch, grid=None) for point in curve.points)
    aligned = mode(row_alignment_bytes(point.workload) or 0 for point in curve.points)
    kept = tuple(
        point
        for point in curve.points
        if not variant_words(main, point.launch)
        and (row_alignment_bytes(point.workload) or 0) >= aligned
    )
    # One point is no curve.
    return replace(curve, points=kept) if len(kept) > 1 else curve


def axes_of(points: Sequence[Point]) -> tuple[str, ...]:
    """Returns the axes with more than one value, ordered by decreasing number of values.

    Leaves out the axis `shape`, whose values number the shapes of a list and are not sizes.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for point in points:
        for name, value in point.axes.items():
            values[name].add(value)
    varied = [name for name, found in values.items() if len(found) > 1 and name != SHAPE_DIM]
    return tuple(sorted(varied, key=lambda name: -len(values[name])))


#: ratio of the median's standard error to the mean's, for samples of a normal distribution: √(π/2)
MEDIAN_FACTOR = sqrt(np.pi / 2)
#: smallest relative scatter between two measurements of one point, even on an idle GPU
LEAST_ERROR = 0.002
# Relative error assumed for single times if too few sizes are close together to estimate it. In
# published tables (aiconfigurator-core), rows with the same work differ by 1 to 3 %.
_UNKNOWN_ERROR = 0.03
# A point with fewer samples than this number N takes part of its noise from its curve. With n
# samples, the point's own variance has the weight n/N, and the square of the curve's mean noise has
# the rest. Below 3 samples, only the curve's mean noise is used.
_OWN_SAMPLES = 10
# The median absolute deviation of few samples is too small on average. These factors correct it for
# n = 2 … 9 samples. For more samples the factor is n / (n − 0.8). Source: Croux and Rousseeuw,
# "Time-efficient algorithms for two highly robust estimators of scale" (COMPSTAT 1992).
_FEW_SAMPLES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
# Two sizes closer than _CLOSE in log size are treated as repetitions of one measurement. At least
# _FEWEST_CLOSE pairs of such sizes are needed to estimate an error.
_CLOSE = 0.02
_FEWEST_CLOSE = 8
# Two independent normal values with standard deviation σ differ by |d|. The median of |d| / σ is
# √2 · Φ⁻¹(3/4), and its lower quartile is √2 · Φ⁻¹(5/8).
_MEDIAN_PER_SIGMA = sqrt(2) * 0.674490
_QUARTILE_PER_SIGMA = sqrt(2) * 0.318639


def repeatability(records: Iterable[Record]) -> float:
    """Returns the relative standard deviation between repeated measurements of reference points.

    A reference point is measured again and again during a run, on every device of the run, so the
    result includes differences between devices. It is at least LEAST_ERROR. If there are too few
    repetitions for a robust estimate, their pooled standard deviation is used.
    """
    medians_us = reference_medians(records)
    known = reference_noise(medians_us)
    return max(LEAST_ERROR, pooled_noise(medians_us.values())[0] if known is None else known)


def _errors(curve: Curve, between: float, single_time_error: float) -> Floats:
    """Returns the standard errors of a curve's log times (points,).

    between: scatter between repeated measurements of one point, in log time (see `fit_curves`).
    single_time_error: standard error of a single sample, in log time.
    """
    count = _column(curve.points, "num_samples")
    if count.max() == 1:  # single times, as in most imported tables
        return np.full(len(count), sqrt(between**2 + single_time_error**2))
    factors = count / (count - 0.8)
    for few, factor in _FEW_SAMPLES.items():
        factors[count == few] = factor
    own = _column(curve.points, "noise") * factors
    several = count >= 3
    shared = float(np.mean(own[several])) if several.any() else 0.0
    known = np.minimum(count, _OWN_SAMPLES) / _OWN_SAMPLES
    scatter = np.where(several, np.sqrt(known * own**2 + (1 - known) * shared**2), shared)
    errors = np.sqrt((MEDIAN_FACTOR * scatter) ** 2 / count + between**2)
    return errors if several.any() else np.sqrt(errors**2 + single_time_error**2 / count)


def _error_of_single_times(curves: Sequence[Curve]) -> float:
    """Estimates the standard error of a family's single times from pairs of close sizes.

    Most steps go up, so a larger size with a shorter time shows noise. The median drop over such
    pairs measures the noise, because noise is symmetric. If a slope leaves too few drops, the lower
    quartile of the absolute differences over all pairs is used. Steps in up to half of the pairs
    change this quartile little.
    """
    rises = []
    for curve in curves:
        rises.append(np.diff(curve.log_time)[np.diff(curve.log_size) < _CLOSE])
    pooled = np.concatenate(rises)
    falls = pooled[pooled < 0]
    if len(falls) >= _FEWEST_CLOSE:
        return float(np.median(-falls)) / _MEDIAN_PER_SIGMA
    if len(pooled) >= _FEWEST_CLOSE:
        return float(np.quantile(np.abs(pooled), 0.25)) / _QUARTILE_PER_SIGMA
    return _UNKNOWN_ERROR


# Standard errors are scaled up if the points scatter around their fits by more than this many times
# the expected scatter.
_MAX_EXCESS_SCATTER = 1.3
# Minimum number of degrees of freedom, summed over a family's fits, that is needed to estimate the
# scatter around the fits.
_ENOUGH_FREEDOM = 8
# Factors by which the estimated noise of single times is multiplied to find the most likely fits.
# The factor 1.0 keeps the estimate from close sizes.
_NOISE_FACTORS = (1.0, 0.5, 0.7, 1.4)
# In a family with more curves than this, close sizes determine the noise well enough, so only the
# factor 1.0 is tried.
_MANY_CURVES = 4
# Minimum number of degrees of freedom per point. Fits with fewer are rejected.
_MIN_FREEDOM_PER_POINT = 0.4


@dataclass(frozen=True)
class FittedCurve:
    """A curve with its piecewise fit.

    sigma: standard errors of the log times (points,).
    """

    curve: Curve
    sigma: Floats
    fit: PiecewiseFit

    def part(self, start: int, stop: int) -> FittedCurve:
        """Returns the points start … stop − 1 as a curve, with the fit cut to these points."""
        breaks = []
        for one in self.fit.breaks:
            if start <= one.index < stop - 1:
                first = max(one.first, start) - start
                last = min(one.last, stop - 2) - start
                breaks.append(replace(one, index=one.index - start, first=first, last=last))
        levels = self.fit.levels[start:stop]
        fit = PiecewiseFit(tuple(breaks), levels, self.fit.trend[start : stop - 1])
        curve = replace(self.curve, points=self.curve.points[start:stop])
        return FittedCurve(curve, self.sigma[start:stop], fit)


def fit_curves(curves: Sequence[Curve], between: float) -> tuple[FittedCurve, ...]:
    """Fits every curve and returns the fits in the same order.

    between: scatter between repeated measurements of one point, in log time (see `repeatability`).
        The samples of a single measurement do not show this scatter.
    """
    families: dict[Family, list[int]] = defaultdict(list)
    for i, curve in enumerate(curves):
        families[curve.family].append(i)
    found: dict[int, FittedCurve] = {}
    for members in families.values():
        fitted = _fit_family([curves[i] for i in members], between)
        found.update(zip(members, fitted, strict=True))
    return tuple(map(found.__getitem__, range(len(curves))))


def _fit_family(curves: Sequence[Curve], between: float) -> list[FittedCurve]:
    """Fits the curves of one family, and returns the fits in the order of the curves.

    The standard errors are scaled up if the points scatter around the fits more than expected. If
    no point has three samples or more, the noise level with the most likely fits is used instead.
    """
    single_time_error = _error_of_single_times(curves)
    sigmas = [_errors(curve, between, single_time_error) for curve in curves]
    if all(_column(curve.points, "num_samples").max() < 3 for curve in curves):
        grids = _best_of_single_times(curves, sigmas, between)
    else:
        grids = _find(curves, sigmas)
        factor = _scatter_factor(grids)
        if factor > _MAX_EXCESS_SCATTER:
            sigmas = [sigma * factor for sigma in sigmas]
            grids = _find(curves, sigmas)
    found: dict[int, FittedCurve] = {}
    for members, pieces in grids:
        for i, sigma, fit in zip(members, pieces.sigma, describe(pieces), strict=True):
            found[i] = FittedCurve(curves[i], sigma, fit)
    return list(map(found.__getitem__, range(len(curves))))


# One entry for each batch of curves that were fitted together: the indices of the curves in their
# family, and the pieces found.
_Grids = list[tuple[list[int], Pieces]]


# Maximum of curves × points² in one batch, which bounds the memory. All curves of a batch have the
# same number of points.
_MOST_TOGETHER = 1_000_000


def _find(curves: Sequence[Curve], sigmas: Sequence[Floats]) -> _Grids:
    """Finds the pieces of all curves, in batches of curves with the same number of points."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, curve in enumerate(curves):
        by_length[len(curve.points)].append(i)
    found: _Grids = []
    for points, members in by_length.items():
        step = max(1, _MOST_TOGETHER // points**2)
        for first in range(0, len(members), step):
            own = members[first : first + step]
            rows = [(curves[i].log_size, curves[i].log_time, sigmas[i]) for i in own]
            found.append((own, find_pieces(*np.stack(rows, axis=1))))
    return found


def _best_of_single_times(curves: Sequence[Curve], sigmas: list[Floats], between: float) -> _Grids:
    """Fits curves of single times at several noise levels, and returns the most likely fits.

    The likelihood includes a penalty for each break. Fits with few degrees of freedom are rejected,
    because pieces of one or two points can explain any noise.
    """
    best: _Grids = []
    best_cost = np.inf
    points = sum(len(curve.points) for curve in curves)
    for factor in _NOISE_FACTORS if len(curves) <= _MANY_CURVES else (1.0,):
        scaled = [np.maximum(sigma * factor, between) for sigma in sigmas]
        grids = _find(curves, scaled)
        # −2 log likelihood up to a constant, plus the penalties.
        cost = sum(float(pieces.cost.sum() + 2 * np.log(pieces.sigma).sum()) for _, pieces in grids)
        free = sum(float(pieces.freedom.sum()) for _, pieces in grids)
        if free < _MIN_FREEDOM_PER_POINT * points:
            cost = np.inf
        if not best or cost < best_cost:
            best = grids
            best_cost = cost
    return best


def _scatter_factor(grids: _Grids) -> float:
    """Returns the measured scatter around the fits, divided by the expected scatter.

    The median over the curves is taken, so that a few badly fitted curves have no effect. The
    result is 1 if there are too few degrees of freedom.
    """
    freedom = np.concatenate([pieces.freedom for _, pieces in grids])
    chi2 = np.concatenate([pieces.chi2 for _, pieces in grids])
    known = freedom >= 1
    if freedom.sum() < _ENOUGH_FREEDOM or not known.any():
        return 1.0
    return float(np.sqrt(np.median(chi2[known] / freedom[known])))
