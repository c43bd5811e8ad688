"""Curves: the points of a run that differ in one axis and in nothing else, with their noise and piecewise fits.

`curves_of` makes the curves, `axes_of` names the axes, `fit_curves` fits. Cliffs, periods, rules and pictures start
here. The standard error of a point's log time has three parts (`standard_errors`): the scatter of its own samples over
the root of their number; the scatter from point to point beyond the samples (memory placement, clock), which the
repeated reference point shows (`repeatability`); and, for tables with one figure per point, the scatter between sizes
so close that the work is the same. Curves over the same sizes are fitted together, and where the fits of a family
scatter more than expected, its standard errors are raised to match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from math import sqrt
from operator import attrgetter
from typing import Any

import numpy as np

from quantbench.analysis.significance import reference_medians, reference_noise
from quantbench.analysis.step_detection import Floats, Pieces, PiecewiseFit, describe, find_pieces, join
from quantbench.analysis.summary import Point
from quantbench.quantization import cdiv
from quantbench.store.record import Record
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.workload import Workload

#: op, provider and variant of the curves that are fitted and explained together
Family = tuple[str, str, str]

#: between sizes further apart than this (in log size) there may be any number of steps
COARSE = 0.125

# What of a workload is no size: points that differ in one of these are never on one curve.
_VARIANTS = ("dtype", "layout", "mask", "causal", "direction", "op")


@dataclass(frozen=True)
class Curve:
    """Points of one op and provider along `axis`, ascending, no two at the same size.

    held: values of the other axes.
    variant: what the workloads have in common besides sizes (`gemm bf16 nt`).
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
        """The axis values."""
        return tuple(point.axes[self.axis] for point in self.points)

    @cached_property
    def log_size(self) -> Floats:
        """Natural logarithm of the axis values (points,)."""
        return np.log(np.array(self.sizes, dtype=np.float64))

    @cached_property
    def close_gaps(self) -> tuple[int, ...]:
        """Indices of points whose next neighbour is close enough to tell a step between them."""
        return tuple((self.log_size[1:] - self.log_size[:-1] <= COARSE).nonzero()[0].tolist())

    @cached_property
    def log_time(self) -> Floats:
        """Natural logarithm of the medians in microseconds (points,)."""
        return np.log([point.latency_us for point in self.points])


def _variant_of(workload: Workload) -> str:
    """Kind and everything beside sizes: `gemm bf16 nt`."""
    kind: Any = type(workload)
    return _variant(_variant_getter(kind)(workload))


@cache
def _variant_getter(kind: Any) -> attrgetter[tuple[object, ...]]:
    names = {f.name for f in fields(kind)}
    return attrgetter("kind", *(name for name in _VARIANTS if name in names))


@cache
def _variant(values: tuple[object, ...]) -> str:
    return " ".join(map(str, values))


def family_of(point: Point) -> Family:
    """Returns op, provider and variant of a point."""
    return (point.op, point.provider, _variant_of(point.workload))


def curves_of(points: Iterable[Point], axis: str, *, fewest: int = 2) -> tuple[Curve, ...]:
    """All curves along `axis` that have at least `fewest` points, in the order they are first met.

    Where several records stand at one place (a table that names kernels), the fastest counts.
    """
    groups: dict[tuple[object, ...], dict[int, Point]] = {}
    for point in points:
        size = point.axes.get(axis)
        if size is None:
            continue
        held = tuple([item for item in point.axes.items() if item[0] != axis])
        key = (*family_of(point), held)
        group = groups.get(key)
        if group is None:
            groups[key] = {size: point}
            continue
        seen = group.get(size)
        if seen is None or point.latency_us < seen.latency_us:
            group[size] = point
    return tuple(
        Curve(axis, op, provider, variant, held, tuple(point for _, point in sorted(group.items())))  # type: ignore[arg-type]
        for (op, provider, variant, held), group in groups.items()
        if len(group) >= fewest
    )


def axes_of(points: Sequence[Point]) -> tuple[str, ...]:
    """The axes along which the points differ, those with the most values first.

    The number of a shape in a list of shapes is not a size and is left out.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for point in points:
        for name, value in point.axes.items():
            values[name].add(value)
    varied = [name for name, found in values.items() if len(found) > 1 and name != SHAPE_DIM]
    return tuple(sorted(varied, key=lambda name: -len(values[name])))


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
# Sizes this close in log size are near enough to ask how well figures repeat.
_CLOSE = 0.02
_FEWEST_CLOSE = 8
# |difference| of two normal figures over the standard deviation of one: its median, √2 · Φ⁻¹(3/4), and its lower
# quartile, √2 · Φ⁻¹(5/8).
_MEDIAN_PER_SIGMA = sqrt(2) * 0.674490
_QUARTILE_PER_SIGMA = sqrt(2) * 0.318639


def repeatability(records: Iterable[Record]) -> float:
    """Relative standard deviation between repetitions of the run's reference points.

    Where there are too few, the smallest known of any device. Differences between the devices of a run count.
    """
    return max(LEAST_ERROR, reference_noise(reference_medians(records)) or 0.0)


def standard_errors(curves: Sequence[Curve], between: float) -> list[Floats]:
    """The standard error of each point's log time, for each curve (points,).

    between: see `repeatability`. Curves of one family share what is known about single figures.
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


def _errors_of_figures(curves: Sequence[Curve]) -> dict[Family, float]:
    """By family: the standard error of a single figure, from pairs of close sizes.

    Steps go up, so where the larger of two close sizes took less time, it was noise, which is as often negative as
    positive. Where a slope leaves too few such pairs, the lower quartile of all is used: up to half of them may hold a
    step.
    """
    families: dict[Family, list[Curve]] = {}
    for curve in curves:
        families.setdefault(curve.family, []).append(curve)
    found = {}
    for family, members in families.items():
        close = np.diff(np.concatenate([curve.log_size for curve in members])) < _CLOSE
        close[np.cumsum([len(curve.points) for curve in members])[:-1] - 1] = False  # from one curve to the next
        pooled = np.diff(np.concatenate([curve.log_time for curve in members]))[close]
        falls = pooled[pooled < 0]
        if len(falls) >= _FEWEST_CLOSE:
            found[family] = float(np.median(-falls)) / _MEDIAN_PER_SIGMA
        elif len(pooled) >= _FEWEST_CLOSE:
            found[family] = float(np.quantile(np.abs(pooled), 0.25)) / _QUARTILE_PER_SIGMA
        else:
            found[family] = _UNKNOWN_ERROR
    return found


# Pieces that leave this many times the scatter expected of them say that points differ by more than their samples do.
_SETTLED = 1.3
# A family's scatter is taken from its fits once they have this many degrees of freedom together.
_ENOUGH_FREEDOM = 8
# How far single figures may be noisier or quieter than close pairs of sizes suggest; what they suggest comes first.
_NOISE_FACTORS = (1.0, 0.5, 0.7, 1.4)
# A table of more curves than this has close pairs enough to tell the noise by themselves.
_MANY_CURVES = 4
# Share of the points that must be left as freedom to the scatter for it to tell the noise.
_ENOUGH_SHARE = 0.4


@dataclass(frozen=True)
class FittedCurve:
    """A curve with its fit.

    sigma: standard error of each log time (points,).
    fit: levels, trend and breaks.
    """

    curve: Curve
    sigma: Floats
    fit: PiecewiseFit

    def part(self, start: int, stop: int) -> FittedCurve:
        """Points start to stop − 1, with their part of the fit."""
        breaks = tuple(
            replace(b, index=b.index - start, first=max(b.first, start) - start, last=min(b.last, stop - 2) - start)
            for b in self.fit.breaks
            if start <= b.index < stop - 1
        )
        fit = PiecewiseFit(breaks, self.fit.levels[start:stop], self.fit.trend[start : stop - 1])
        return FittedCurve(replace(self.curve, points=self.curve.points[start:stop]), self.sigma[start:stop], fit)


def fit_curves(curves: Sequence[Curve], between: float) -> tuple[FittedCurve, ...]:
    """Fit every curve, in the order given.

    between: scatter from point to point beyond the samples (see `repeatability`).
    """
    sigmas = standard_errors(curves, between)
    families: dict[Family, list[int]] = {}
    for i, curve in enumerate(curves):
        families.setdefault(curve.family, []).append(i)
    found: dict[int, FittedCurve] = {}
    for members in families.values():
        family = [curves[i] for i in members]
        fitted = _fit_family(family, [sigmas[i] for i in members], between)
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


# Curves that are fitted together, by their places in the family, and their pieces.
_Grids = list[tuple[list[int], Pieces]]


# A curve of more points is fitted in parts of at most _PART points: the work for a part grows with their square.
_LONGEST, _PART = 1024, 256
# So many curves over the same sizes are a batch of their own, and so is a curve of more points than this.
_MANY_ALIKE, _LONG = 8, 256
# Other curves of equal length are fitted together up to this many curves × points², which bounds the memory.
_MOST_TOGETHER = 1_000_000


def _find(curves: Sequence[Curve], sigmas: Sequence[Floats]) -> _Grids:
    spans = [(i, start, stop) for i, curve in enumerate(curves) for start, stop in _spans(len(curve.points))]
    found: _Grids = []
    parts: dict[int, list[tuple[int, Pieces, int]]] = {}
    for members in _batches([curves[i].log_size[start:stop] for i, start, stop in spans]):
        own = [spans[s] for s in members]
        sizes = np.stack([curves[i].log_size[start:stop] for i, start, stop in own])
        times = np.stack([curves[i].log_time[start:stop] for i, start, stop in own])
        errors = np.stack([sigmas[i][start:stop] for i, start, stop in own])
        pieces = find_pieces(sizes[0] if (sizes == sizes[0]).all() else sizes, times, errors)
        if all(stop - start == len(curves[i].points) for i, start, stop in own):
            found.append(([i for i, _, _ in own], pieces))
        else:
            for row, (i, start, _) in enumerate(own):
                parts.setdefault(i, []).append((start, pieces, row))
    for i, of_curve in parts.items():
        ordered = [(pieces, row) for _, pieces, row in sorted(of_curve, key=lambda part: part[0])]
        found.append(([i], join(ordered, curves[i].log_size, curves[i].log_time, sigmas[i])))
    return found


def _spans(points: int) -> list[tuple[int, int]]:
    """First point and end of each part in which a curve is fitted; most curves are one part."""
    number = 1 if points <= _LONGEST else cdiv(points, _PART)
    return list(pairwise(points * i // number for i in range(number + 1)))


def _batches(grids: Sequence[Floats]) -> list[list[int]]:
    """Curves that are fitted together: those over the same sizes, or where few share their sizes, those of equal
        length.

    grids: the log sizes of each curve.
    """
    by_grid: dict[bytes, list[int]] = {}
    for i, grid in enumerate(grids):
        by_grid.setdefault(grid.tobytes(), []).append(i)
    batches: list[list[int]] = []
    rest: dict[int, list[int]] = {}
    for members in by_grid.values():
        points = len(grids[members[0]])
        if len(members) >= _MANY_ALIKE or points > _LONG:
            batches.append(members)
        else:
            rest.setdefault(points, []).extend(members)
    for points, members in rest.items():
        step = _MOST_TOGETHER // points**2
        batches += [members[i : i + step] for i in range(0, len(members), step)]
    return batches


def _best_of_figures(curves: Sequence[Curve], sigmas: list[Floats], between: float) -> _Grids:
    """The fits at the noise level under which pieces and scatter together are most likely, for single figures.

    Levels that leave the scatter little freedom are rejected: pieces of one or two points can explain anything.
    """
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
    """Scatter about the fits over the scatter expected; 1 where there is too little freedom to tell.

    The median over the curves, so that a few curves that no pieces fit do not spoil the rest.
    """
    freedom = np.concatenate([pieces.freedom for _, pieces in grids])
    chi2 = np.concatenate([pieces.chi2 for _, pieces in grids])
    known = freedom >= 1
    if freedom.sum() < _ENOUGH_FREEDOM or not known.any():
        return 1.0
    return float(np.sqrt(np.median(chi2[known] / freedom[known])))
