"""Groups points into curves along one axis, estimates their noise and fits them piecewise.

The standard error of a point's log time has three parts: the error of the median from its own
samples; the scatter between points (`repeatability` of the reference point); and, for single times,
the scatter between nearly equal sizes. If the fits of a family scatter more than expected, its
standard errors are scaled up to match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from math import sqrt
from operator import attrgetter
from typing import Any

import numpy as np

from quantbench.analysis.significance import pooled_noise, reference_medians, reference_noise
from quantbench.analysis.step_detection import (
    Floats,
    Pieces,
    PiecewiseFit,
    describe,
    find_pieces,
    join,
)
from quantbench.analysis.summary import Point
from quantbench.quantization import cdiv
from quantbench.store.record import Record
from quantbench.sweep.axes import SHAPE_DIM

#: op, provider and variant of the curves that are fitted and explained together
Family = tuple[str, str, str]

#: neighbours further apart than this (log size) are too distant to locate a step between them
COARSE = 0.125

# Workload fields that are not sizes: points of one curve agree in all of them.
_VARIANTS = ("dtype", "layout", "mask", "causal", "direction", "op", "distribution")


@dataclass(frozen=True)
class Curve:
    """Points of one op and provider along `axis`, by ascending size without duplicates.

    held: (axis, value) of the other axes.
    variant: kind of the workloads and their fields that are not sizes (`gemm bf16 nt`).
    """

    axis: str
    op: str
    provider: str
    variant: str
    held: tuple[tuple[str, int], ...]
    points: tuple[Point, ...]

    @property
    def family(self) -> Family:
        """Op, provider and variant. Curves of one family are fitted and explained together."""
        return (self.op, self.provider, self.variant)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.axes[self.axis] for point in self.points)

    @cached_property
    def log_size(self) -> Floats:
        """Natural logarithm of the axis values (points,)."""
        return np.log(np.array(self.sizes, dtype=np.float64))

    @cached_property
    def close_gaps(self) -> tuple[int, ...]:
        """Indices of the points whose next neighbour is within COARSE."""
        return tuple((self.log_size[1:] - self.log_size[:-1] <= COARSE).nonzero()[0].tolist())

    @cached_property
    def log_time(self) -> Floats:
        """Natural logarithm of the medians in microseconds (points,)."""
        return np.log([point.latency_us for point in self.points])


@cache
def _variant_getter(kind: Any) -> attrgetter[tuple[object, ...]]:
    names = {f.name for f in fields(kind)}
    return attrgetter("kind", *(name for name in _VARIANTS if name in names))


def curve_family(point: Point) -> Family:
    """Returns op, provider and variant of a point; the variant is the kind and what is no size:
    `gemm bf16 nt`.
    """
    kind: Any = type(point.workload)
    return (point.op, point.provider, " ".join(map(str, _variant_getter(kind)(point.workload))))


def curves_of(points: Iterable[Point], axis: str, *, fewest: int = 2) -> tuple[Curve, ...]:
    """Returns all curves along `axis` with at least `fewest` points, in order of first appearance.

    The points of a curve have one timing mode: between modes times differ by 1-2.5 µs, which is no
    cliff. Of several records at one place (a table with a row per kernel) the fastest counts.
    """
    groups: dict[tuple[object, ...], dict[int, Point]] = {}
    for point in points:
        size = point.axes.get(axis)
        if size is None:
            continue
        held = tuple([item for item in point.axes.items() if item[0] != axis])
        group = groups.setdefault((*curve_family(point), held, point.mode), {})
        if size not in group or point.latency_us < group[size].latency_us:
            group[size] = point
    return tuple(
        Curve(axis, op, provider, variant, held, tuple(point for _, point in sorted(group.items())))  # type: ignore[arg-type]
        for (op, provider, variant, held, _), group in groups.items()
        if len(group) >= fewest
    )


def axes_of(points: Sequence[Point]) -> tuple[str, ...]:
    """Returns the axes with more than one value, those with the most values first.

    Leaves out the index of a shape in a list of shapes, because it is not a size.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for point in points:
        for name, value in point.axes.items():
            values[name].add(value)
    varied = [name for name, found in values.items() if len(found) > 1 and name != SHAPE_DIM]
    return tuple(sorted(varied, key=lambda name: -len(values[name])))


#: ratio of the standard errors of median and mean, for a normal distribution: √(π/2)
MEDIAN_FACTOR = sqrt(np.pi / 2)
#: smallest relative scatter between two measurements of one point, even on an idle GPU
LEAST_ERROR = 0.002
# Relative error of single times if too few sizes are close together to estimate it; rows of
# published tables repeat within 1 to 3 % (aiconfigurator-core, rows with the same work).
_UNKNOWN_ERROR = 0.03
# A point with fewer samples is given part of the mean noise of its curve.
_OWN_SAMPLES = 10
# The median absolute deviation of few samples is too small on average; factors for 2 … 9 samples,
# and n / (n − 0.8) for more, from Croux and Rousseeuw, "Time-efficient algorithms for two highly
# robust estimators of scale" (COMPSTAT 1992).
_FEW_SAMPLES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
# Sizes within this distance (log size) are treated as repetitions; at least so many are needed.
_CLOSE = 0.02
_FEWEST_CLOSE = 8
# |difference| of two normal values over the standard deviation of one: its median, √2 · Φ⁻¹(3/4),
# and its lower quartile, √2 · Φ⁻¹(5/8).
_MEDIAN_PER_SIGMA = sqrt(2) * 0.674490
_QUARTILE_PER_SIGMA = sqrt(2) * 0.318639


def repeatability(records: Iterable[Record]) -> float:
    """Returns the relative standard deviation between repetitions of the run's reference points.

    At least LEAST_ERROR, also without repetitions. Includes differences between the devices of a
    run.
    """
    medians_us = reference_medians(records)
    known = reference_noise(medians_us)
    return max(LEAST_ERROR, pooled_noise(medians_us.values())[0] if known is None else known)


def _errors(curve: Curve, between: float, figure_error: float) -> Floats:
    """Returns the standard errors of a curve's log times (points,). figure_error: that of points of
    a single sample.
    """
    if all(point.num_samples == 1 for point in curve.points):  # most imported tables
        return np.full(len(curve.points), sqrt(between**2 + figure_error**2))
    count = np.array([point.num_samples for point in curve.points], dtype=np.float64)
    factors = [
        _FEW_SAMPLES.get(p.num_samples, p.num_samples / (p.num_samples - 0.8)) for p in curve.points
    ]
    own = np.array(
        [point.noise * factor for point, factor in zip(curve.points, factors, strict=True)]
    )
    several = count >= 3
    shared = float(np.mean(own[several])) if several.any() else 0.0
    known = np.minimum(count, _OWN_SAMPLES) / _OWN_SAMPLES
    scatter = np.where(several, np.sqrt(known * own**2 + (1 - known) * shared**2), shared)
    errors = np.sqrt((MEDIAN_FACTOR * scatter) ** 2 / count + between**2)
    return errors if several.any() else np.sqrt(errors**2 + figure_error**2 / count)


def _errors_of_figures(curves: Sequence[Curve]) -> dict[Family, float]:
    """Estimates, by family, the standard error of a single time from pairs of close sizes.

    Steps go up, so a larger size that took less time shows noise, which is symmetric. If a slope
    leaves too few such pairs, the lower quartile of all pairs is used, which tolerates steps in
    half of them.
    """
    families: dict[Family, list[Curve]] = defaultdict(list)
    for curve in curves:
        families[curve.family].append(curve)
    found = {}
    for family, members in families.items():
        close = np.diff(np.concatenate([curve.log_size for curve in members])) < _CLOSE
        close[np.cumsum([len(curve.points) for curve in members])[:-1] - 1] = (
            False  # pairs across two curves
        )
        pooled = np.diff(np.concatenate([curve.log_time for curve in members]))[close]
        falls = pooled[pooled < 0]
        if len(falls) >= _FEWEST_CLOSE:
            found[family] = float(np.median(-falls)) / _MEDIAN_PER_SIGMA
        elif len(pooled) >= _FEWEST_CLOSE:
            found[family] = float(np.quantile(np.abs(pooled), 0.25)) / _QUARTILE_PER_SIGMA
        else:
            found[family] = _UNKNOWN_ERROR
    return found


# Standard errors are scaled up if the fits scatter more than this many times as expected.
_SETTLED = 1.3
# Fewest degrees of freedom of a family's fits from which its scatter is estimated.
_ENOUGH_FREEDOM = 8
# Factors on the noise of single times that are tried; 1.0, the estimate from close sizes, comes
# first.
_NOISE_FACTORS = (1.0, 0.5, 0.7, 1.4)
# Families with more curves have enough close pairs, and no other factor is tried.
_MANY_CURVES = 4
# Fits must leave at least this many degrees of freedom per point.
_ENOUGH_SHARE = 0.4


@dataclass(frozen=True)
class FittedCurve:
    """A curve with its piecewise fit. sigma: standard errors of the log times (points,)."""

    curve: Curve
    sigma: Floats
    fit: PiecewiseFit

    def part(self, start: int, stop: int) -> FittedCurve:
        """Returns points start … stop − 1 with their part of the fit."""
        breaks = tuple(
            replace(
                b,
                index=b.index - start,
                first=max(b.first, start) - start,
                last=min(b.last, stop - 2) - start,
            )
            for b in self.fit.breaks
            if start <= b.index < stop - 1
        )
        fit = PiecewiseFit(breaks, self.fit.levels[start:stop], self.fit.trend[start : stop - 1])
        return FittedCurve(
            replace(self.curve, points=self.curve.points[start:stop]), self.sigma[start:stop], fit
        )


def fit_curves(curves: Sequence[Curve], between: float) -> tuple[FittedCurve, ...]:
    """Fits every curve; returns the fits in the same order.

    between: scatter between points beyond their samples, log time (see `repeatability`).
    """
    figures = _errors_of_figures(curves)
    sigmas = [_errors(curve, between, figures[curve.family]) for curve in curves]
    families: dict[Family, list[int]] = defaultdict(list)
    for i, curve in enumerate(curves):
        families[curve.family].append(i)
    found: dict[int, FittedCurve] = {}
    for members in families.values():
        fitted = _fit_family([curves[i] for i in members], [sigmas[i] for i in members], between)
        found.update(zip(members, fitted, strict=True))
    return tuple(found[i] for i in range(len(curves)))


def _fit_family(curves: Sequence[Curve], sigmas: list[Floats], between: float) -> list[FittedCurve]:
    if all(point.num_samples < 3 for curve in curves for point in curve.points):
        grids = _best_of_figures(curves, sigmas, between)
    else:
        grids = _find(curves, sigmas)
        factor = _scatter_factor(grids)
        if factor > _SETTLED:
            sigmas = [sigma * factor for sigma in sigmas]
            grids = _find(curves, sigmas)
    found: dict[int, FittedCurve] = {}
    for members, pieces in grids:
        for i, sigma, fit in zip(members, pieces.sigma, describe(pieces), strict=True):
            found[i] = FittedCurve(curves[i], sigma, fit)
    return [found[i] for i in range(len(curves))]


# For each batch of curves fitted together: their indices in the family, and their pieces.
_Grids = list[tuple[list[int], Pieces]]


# A longer curve is fitted in parts of at most _PART points, because time grows with the square of
# the points.
_LONGEST, _PART = 1024, 256
# Curves of equal length are fitted together up to this many curves × points², to bound the memory.
_MOST_TOGETHER = 1_000_000


def _find(curves: Sequence[Curve], sigmas: Sequence[Floats]) -> _Grids:
    # (curve, first point, end) of the parts in which curves are fitted; usually one part each
    spans: list[tuple[int, int, int]] = []
    for i, curve in enumerate(curves):
        points = len(curve.points)
        number = 1 if points <= _LONGEST else cdiv(points, _PART)
        spans += [
            (i, *ends) for ends in pairwise(points * part // number for part in range(number + 1))
        ]
    found: _Grids = []
    parts: dict[int, list[tuple[int, Pieces, int]]] = {}
    for own in _batches(spans):
        sizes = np.stack([curves[i].log_size[start:stop] for i, start, stop in own])
        times = np.stack([curves[i].log_time[start:stop] for i, start, stop in own])
        errors = np.stack([sigmas[i][start:stop] for i, start, stop in own])
        pieces = find_pieces(sizes, times, errors)
        if all(stop - start == len(curves[i].points) for i, start, stop in own):
            found.append(([i for i, _, _ in own], pieces))
        else:
            for row, (i, start, _) in enumerate(own):
                parts.setdefault(i, []).append((start, pieces, row))
    for i, of_curve in parts.items():
        ordered = [(pieces, row) for _, pieces, row in sorted(of_curve, key=lambda part: part[0])]
        found.append(([i], join(ordered, curves[i].log_size, curves[i].log_time, sigmas[i])))
    return found


def _batches(spans: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields parts of equal length. spans: (curve, first point, end) of each part."""
    by_length: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for span in spans:
        by_length[span[2] - span[1]].append(span)
    for points, members in by_length.items():
        step = max(1, _MOST_TOGETHER // points**2)
        yield from (members[i : i + step] for i in range(0, len(members), step))


def _best_of_figures(curves: Sequence[Curve], sigmas: list[Floats], between: float) -> _Grids:
    """Fits curves of single times at several noise levels, and returns the fits with the highest
    likelihood. Fits with few degrees of freedom are rejected, because pieces of one or two points
    can explain any noise."""
    best: _Grids = []
    best_cost = np.inf
    points = sum(len(curve.points) for curve in curves)
    for factor in _NOISE_FACTORS if len(curves) <= _MANY_CURVES else (1.0,):
        scaled = [np.maximum(sigma * factor, between) for sigma in sigmas]
        grids = _find(curves, scaled)
        cost = sum(float(pieces.cost.sum() + 2 * np.log(pieces.sigma).sum()) for _, pieces in grids)
        free = sum(float(pieces.freedom.sum()) for _, pieces in grids)
        if not best or (cost < best_cost and free >= _ENOUGH_SHARE * points):
            best, best_cost = grids, cost if free >= _ENOUGH_SHARE * points else np.inf
    return best


def _scatter_factor(grids: _Grids) -> float:
    """Returns the measured over the expected scatter about the fits; 1 if there are too few degrees
    of freedom. Takes the median over the curves, so that a few badly fitted curves do not affect
    the rest."""
    freedom = np.concatenate([pieces.freedom for _, pieces in grids])
    chi2 = np.concatenate([pieces.chi2 for _, pieces in grids])
    known = freedom >= 1
    if freedom.sum() < _ENOUGH_FREEDOM or not known.any():
        return 1.0
    return float(np.sqrt(np.median(chi2[known] / freedom[known])))
