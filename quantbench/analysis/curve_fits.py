"""Fits curves with pieces (`step_detection`) and settles their noise: `fit_curves`, called by `check`.

Curves over the same sizes are fitted together. The noise of a family of curves is taken from the scatter about its
fits where the samples alone suggest too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quantbench.analysis.curves import Curve, Floats
from quantbench.analysis.point_noise import standard_errors
from quantbench.analysis.step_detection import Pieces, PiecewiseFit, describe, find_pieces, join
from quantbench.quantization import cdiv

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

    between: scatter from point to point beyond the samples (`point_noise.repeatability`).
    """
    sigmas = standard_errors(curves, between)
    families: dict[tuple[str, str, str], list[int]] = {}
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
    """First point and end of each part in which a curve is fitted; of most curves the whole."""
    number = 1 if points <= _LONGEST else cdiv(points, _PART)
    return list(pairwise(points * i // number for i in range(number + 1)))


def _batches(grids: Sequence[Floats]) -> list[list[int]]:
    """Curves over the same sizes together; where hardly any two share their sizes, those of equal length.
    grids: the log sizes of each."""
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
    """Single figures do not tell their noise: the level of it under which pieces and scatter together are likeliest.
    Levels that leave the scatter little freedom are no answer: pieces of a point or two can explain anything."""
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
    """Scatter about the fits over the scatter expected; 1 where there is too little freedom to tell. The middle one of
    the curves counts, so that a few which no pieces fit do not spoil the rest."""
    freedom = np.concatenate([pieces.freedom for _, pieces in grids])
    chi2 = np.concatenate([pieces.chi2 for _, pieces in grids])
    known = freedom >= 1
    if freedom.sum() < _ENOUGH_FREEDOM or not known.any():
        return 1.0
    return float(np.sqrt(np.median(chi2[known] / freedom[known])))
