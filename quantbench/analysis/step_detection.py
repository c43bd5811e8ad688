"""Finds steps in curves by a piecewise linear fit with a penalty on every break.

`find_pieces` cuts each curve into pieces, and `describe` returns the breaks between them. In a
piece, the log time is a straight line against the log size. Its slope has a prior around the local
trend. Dynamic programming finds the best positions of the breaks exactly (Jackson et al., IEEE
Signal Processing Letters 12, 2005).

The trend itself follows from the slopes of the pieces. The pieces and the trend are therefore
estimated in turn, from several initial trends, and the result with the lowest cost is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

# Initial trends, as elasticities (d log time / d log size): constant time, a mix of overhead and
# work, proportional time, and quadratic time (attention over its sequence length).
_FIRST_TRENDS = (0.0, 0.5, 1.0, 2.0)
# Number of rounds from each initial trend. A round estimates the pieces, and then the trend.
_ROUNDS = 3
# Prior standard deviation of a piece's slope around the local trend, as an elasticity.
_SLOPE_SPREAD = 0.15
# The local trend is a Gaussian-weighted mean of slopes. This is the standard deviation of the
# weights in log size: half an octave.
_TREND_WIDTH = 0.35
# Smallest and largest trend, as an elasticity. Workloads lie within 0 (constant time) and 2
# (quadratic time).
_TREND_RANGE = (-0.2, 2.2)
# Maximum number of points of a piece, which bounds the work on very long curves. A longer piece is
# cut by a break of height near 0.
_LONGEST_PIECE = 512
# Largest increase of χ² over the best position of a break, for positions in the break's 95 % range:
# the 95 % quantile of χ² with one degree of freedom.
_CHI2_95 = 3.84


@dataclass(frozen=True)
class Break:
    """A break between points `index` and `index + 1`.

    log_jump: rise of the log time at the break, beyond the trend.
    standard_error: standard error of log_jump.
    first, last: with 95 % confidence, the break lies after a point with an index in this range.
    """

    index: int
    log_jump: float
    standard_error: float
    first: int
    last: int


@dataclass(frozen=True)
class PiecewiseFit:
    """Piecewise fit of one curve.

    breaks: breaks between the pieces, in ascending order.
    levels: fitted log times (points,).
    trend: trend over each gap between two points, as an elasticity (points − 1,).
    """

    breaks: tuple[Break, ...]
    levels: Floats
    trend: Floats


@dataclass(frozen=True)
class Pieces:
    """Optimal pieces of several curves.

    log_size, log_time, sigma: log sizes, log times and their standard errors (curves, points).
    starts: index of the first point of each piece, one array per curve.
    trend: trend over each gap between two points, as an elasticity (curves, points − 1).
    cost: chi2 plus the penalties of the breaks (curves,).
    freedom: degrees of freedom of the residuals (curves,).
    chi2: squared residuals / variance, summed over the points and with the slopes' prior (curves,).
        It is close to `freedom` if sigma is correct.
    """

    log_size: Floats
    log_time: Floats
    sigma: Floats
    starts: tuple[Ints, ...]
    trend: Floats
    cost: Floats
    freedom: Floats
    chi2: Floats


def find_pieces(log_size: Floats, log_time: Floats, sigma: Floats) -> Pieces:
    """Finds the pieces with the lowest cost on each curve.

    The memory that is needed is proportional to curves × points².

    log_size: ascending log sizes (curves, points), or (points,) if all curves have the same sizes.
    log_time, sigma: log times and their standard errors (curves, points).
    """
    curves, points = log_time.shape
    log_size = np.broadcast_to(log_size, log_time.shape)
    cost = np.full(curves, np.inf)
    starts: list[Ints] = [np.zeros(1, dtype=np.intp)] * curves
    trends = np.zeros((curves, max(0, points - 1)))
    # Weights by which the trend at a gap averages the slopes at all gaps (curves, gaps, gaps).
    gaps = (log_size[:, 1:] + log_size[:, :-1]) / 2
    near = np.exp(-0.5 * ((gaps[:, :, None] - gaps[:, None, :]) / _TREND_WIDTH) ** 2)
    for elasticity in _FIRST_TRENDS if points > 1 else ():
        trend = np.full((curves, points - 1), elasticity)
        for _ in range(_ROUNDS):
            sums = _Sums(log_size, log_time, sigma, trend)
            new_cost, new_starts = _partition(sums)
            for c in np.flatnonzero(new_cost < cost - 1e-9):
                cost[c] = new_cost[c]
                starts[c] = new_starts[c]
                trends[c] = trend[c]
            trend = _trend(sums, _Flat.of(new_starts, points), trend, near)
    flat = _Flat.of(starts, points)
    per_piece = _Sums(log_size, log_time, sigma, trends).cost(flat.curve, flat.start, flat.stop)
    chi2 = np.bincount(flat.curve, per_piece, minlength=curves).astype(np.float64)
    # A piece has a level, which is one parameter. If it has several points, it also has a slope,
    # which counts as half a parameter because of its prior.
    parameters = np.where(flat.stop - flat.start > 1, 1.5, 1.0)
    spent = np.bincount(flat.curve, parameters, minlength=curves).astype(np.float64)
    return Pieces(log_size, log_time, sigma, tuple(starts), trends, cost, points - spent, chi2)


def describe(pieces: Pieces) -> tuple[PiecewiseFit, ...]:
    """Converts pieces to a fit of each curve, with its breaks, levels and trend.

    >>> size = np.log(np.arange(1.0, 13.0))
    >>> stairs = np.log([[5.0] * 4 + [10.0] * 4 + [15.0] * 4])
    >>> [b.index for b in describe(find_pieces(size, stairs, np.full((1, 12), 0.01)))[0].breaks]
    [3, 7]
    """
    sums = _Sums(pieces.log_size, pieces.log_time, pieces.sigma, pieces.trend)
    flat = _Flat.of(pieces.starts, sums.shape[1])
    weight, mean_u, mean_z, suu, suz, _ = sums.moments(flat.curve, flat.start, flat.stop)
    slope = suz / (suu + sums.ridge)
    piece = np.repeat(np.arange(len(flat.start)), flat.stop - flat.start).reshape(sums.shape)
    fitted = mean_z[piece] + slope[piece] * (sums.u - mean_u[piece])
    levels = fitted + sums.offset[:, None] + _integral(pieces.trend, pieces.log_size)
    (second,) = np.nonzero(flat.start > 0)  # pieces that follow a break
    curve = flat.curve[second]
    split = flat.start[second]
    edge = (sums.u[curve, split - 1] + sums.u[curve, split]) / 2

    def at_edge(side: Ints) -> tuple[Floats, Floats]:
        """Returns the value and variance of a piece's line in the middle of each gap (breaks,).

        side: index of the piece before or after each break.
        """
        away = edge - mean_u[side]
        variance = 1 / weight[side] + away**2 / (suu[side] + sums.ridge)
        return mean_z[side] + slope[side] * away, variance

    before, before_variance = at_edge(second - 1)
    after, after_variance = at_edge(second)
    errors = np.sqrt(before_variance + after_variance)
    first, last = _places(sums, curve, flat.start[second - 1], split, flat.stop[second])
    columns = map(np.ndarray.tolist, (split - 1, after - before, errors, first, last))
    breaks: dict[int, list[Break]] = defaultdict(list)
    for c, *one in zip(curve.tolist(), *columns, strict=True):
        breaks[c].append(Break(*one))
    fits = []
    for c in range(len(pieces.starts)):
        fits.append(PiecewiseFit(tuple(breaks[c]), levels[c], pieces.trend[c]))
    return tuple(fits)


class _Sums:
    """Cumulative weighted sums over each curve, from which any piece is fitted in constant time.

    The constructor takes log sizes u, log times y and their standard errors (curves, points), and
    the trend over each gap (curves, points − 1). In the methods, z is the log time without the
    trend, centred on each curve.

    u: centred log sizes (curves, points).
    offset: mean log time without the trend, which z leaves out (curves,).
    ridge: precision (1 / variance) of the slopes' prior.
    """

    ridge = _SLOPE_SPREAD**-2.0

    def __init__(self, u: Floats, y: Floats, sigma: Floats, trend: Floats) -> None:
        z = y - _integral(trend, u)
        self.u = u - u.mean(axis=1, keepdims=True)
        self.offset = z.mean(axis=1)
        z = z - self.offset[:, None]
        columns = sigma**-2.0 * np.stack([np.ones_like(z), self.u, z, self.u**2, self.u * z, z**2])
        self._sums = np.concatenate([np.zeros((6, len(z), 1)), np.cumsum(columns, axis=2)], axis=2)
        self.shape = z.shape

    def moments(self, curve: Ints | int, start: Ints, stop: Ints) -> tuple[Floats, ...]:
        """Returns the weight, the means of u and z, and the central Suu, Suz, Szz of each piece.

        A piece has the points start … stop − 1 of a curve. Suu, Suz and Szz are weighted sums of
        squares and products around the piece's means.
        """
        return _moments(self._sums[:, curve, stop] - self._sums[:, curve, start])

    def cost(self, curve: Ints | int, start: Ints, stop: Ints) -> Floats:
        """Returns the cost of each piece's best line: squared residuals / variance, plus the prior.

        The prior penalises slopes that differ from the trend.
        """
        return _cost(self.moments(curve, start, stop))

    def costs_up_to(self, low: int, stop: int) -> Floats:
        """Returns the costs of all pieces that end before `stop` (curves, stop − low).

        The pieces begin at the points low … stop − 1.
        """
        return _cost(_moments(self._sums[:, :, stop : stop + 1] - self._sums[:, :, low:stop]))


def _moments(sums: Floats) -> tuple[Floats, ...]:
    """Converts weighted sums to the moments that `_Sums.moments` returns."""
    w, wu, wz, wuu, wuz, wzz = sums
    mean_u = wu / w
    mean_z = wz / w
    return w, mean_u, mean_z, wuu - wu * mean_u, wuz - wu * mean_z, wzz - wz * mean_z


def _cost(moments: tuple[Floats, ...]) -> Floats:
    """Returns the cost (see `_Sums.cost`) of pieces with these moments."""
    _, _, _, suu, suz, szz = moments
    # Rounding errors may make the cost negative.
    cost: Floats = np.maximum(szz - suz**2 / (suu + _Sums.ridge), 0.0)
    return cost


@dataclass(frozen=True)
class _Flat:
    """All pieces of all curves in sequence.

    curve: index of the curve of each piece (pieces,).
    start, stop: first point and exclusive end of each piece (pieces,).
    """

    curve: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, starts: Sequence[Ints], points: int) -> _Flat:
        """Lists the pieces that begin at `starts` on curves of `points` points."""
        counts = list(map(len, starts))
        start = np.concatenate(starts)
        stop = np.append(start[1:], points)
        stop[np.cumsum(counts) - 1] = points
        return cls(np.repeat(np.arange(len(starts)), counts), start, stop)


def _integral(trend: Floats, u: Floats) -> Floats:
    """Integrates the trend to a log time, which is 0 at the first point (curves, points).

    trend: elasticity over each gap (curves, points − 1).
    u: log sizes (curves, points).
    """
    steps = np.cumsum(trend * np.diff(u), axis=1)
    return np.concatenate([np.zeros((len(steps), 1)), steps], axis=1)


def _partition(sums: _Sums) -> tuple[Floats, list[Ints]]:
    """Partitions every curve into pieces such that cost plus penalties is smallest.

    Returns this smallest sum (curves,), and the first points of the pieces of each curve.
    """
    curves, points = sums.shape
    # Penalty of a break, in units of squared residuals / variance. It is about half of the Bayesian
    # information criterion for position, level and slope. A low penalty is better, because the
    # height of the jump filters spurious breaks later, while missed breaks are lost.
    penalty = 0.5 + 1.5 * log(points)
    best = np.zeros((curves, points + 1))
    best[:, 0] = -penalty
    last = np.zeros((curves, points + 1), dtype=np.intp)
    for stop in range(1, points + 1):
        low = max(0, stop - _LONGEST_PIECE)
        total = best[:, low:stop] + sums.costs_up_to(low, stop)
        choice = np.argmin(total, axis=1)
        last[:, stop] = low + choice
        best[:, stop] = total[np.arange(curves), choice] + penalty
    # Many short curves have the same partition, so each distinct partition is traced back once.
    distinct, which = np.unique(last, axis=0, return_inverse=True)
    found = []
    for previous in distinct.tolist():
        starts = []
        stop = points
        while stop > 0:
            stop = previous[stop]
            starts.append(stop)
        found.append(np.array(starts[::-1], dtype=np.intp))
    return best[:, points], [found[i] for i in which.ravel().tolist()]


def _trend(sums: _Sums, pieces: _Flat, trend: Floats, near: Floats) -> Floats:
    """Estimates the trend over each gap from the slopes of nearby pieces (curves, points − 1).

    trend: previous trend, to which the slopes in `sums` are relative.
    near: weights by which the trend at a gap averages the slopes at all gaps (curves, gaps, gaps).
    """
    _, mean_u, _, suu, suz, _ = sums.moments(pieces.curve, pieces.start, pieces.stop)
    gaps = (sums.u[:, 1:] + sums.u[:, :-1]) / 2
    # The slope of each piece is assigned to the gap nearest to its mean size.
    at = np.clip((gaps[pieces.curve] < mean_u[:, None]).sum(axis=1), 0, gaps.shape[1] - 1)
    # Fitted slopes are relative to the previous trend, so the trend is added back.
    weight = np.zeros_like(trend)
    weighted_slope = np.zeros_like(trend)
    np.add.at(weight, (pieces.curve, at), suu)
    np.add.at(weighted_slope, (pieces.curve, at), suz + suu * trend[pieces.curve, at])
    # A prior at the curve's mean slope stabilises the trend at gaps without a long piece nearby.
    total = weight.sum(axis=1, keepdims=True)
    mean_slope = np.divide(
        weighted_slope.sum(axis=1, keepdims=True), total, out=trend.copy(), where=total > 0
    )
    around = (weight[:, None, :] @ near)[:, 0]
    slope_around = (weighted_slope[:, None, :] @ near)[:, 0]
    blend = (slope_around + sums.ridge * mean_slope) / (around + sums.ridge)
    clipped: Floats = np.clip(blend, *_TREND_RANGE)
    return clipped


def _places(sums: _Sums, curve: Ints, start: Ints, split: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Returns the first and the last point after which each break may lie, with 95 % confidence.

    All arguments but `sums` have one entry per break (breaks,).

    curve: index of the curve.
    start, stop: first point and exclusive end of the two pieces around the break, taken together.
    split: first point after the break.
    """
    if not len(split):
        return split, split
    lengths = stop - start - 1  # number of positions that are tried for each break
    begins = np.cumsum(lengths) - lengths
    own = np.repeat(np.arange(len(split)), lengths)
    tried = np.arange(len(own)) - begins[own] + start[own] + 1
    cost = sums.cost(curve[own], start[own], tried) + sums.cost(curve[own], tried, stop[own])
    within = cost <= (cost[begins + split - start - 1] + _CHI2_95)[own]
    first = np.minimum.reduceat(np.where(within, tried, stop[own]), begins)
    last = np.maximum.reduceat(np.where(within, tried, start[own]), begins)
    return first - 1, last - 1
