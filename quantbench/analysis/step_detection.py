"""Finds steps in curves with a piecewise fit and a penalty on every break: `find_pieces`. Pure arithmetic over arrays.

Called by `curves`; nothing here knows of tiles or waves. The log time is modelled as pieces, each a level plus a
gentle slope against the log size: constant between the waves of a compute-bound product, rising where work or bytes
grow with the size. Dynamic programming finds the exact optimum over all placements of breaks (Jackson et al., "An
algorithm for optimal partitioning of data on an interval", IEEE Signal Processing Letters 12, 2005); asv's
`step_detect` does the same for constants and absolute deviations. Each break costs `break_penalty`, so that noise does
not buy one.

The slope of a piece is drawn towards the trend of its surroundings, and the trend is estimated from the pieces: fit and
trend alternate from several first guesses, and the cheapest result is taken.

Curves with the same number of points are fitted together, so that a table of many short curves costs little more than
its points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

# First guesses of the trend, as elasticities (d log time / d log size): constant, proportional, quadratic (attention
# over its sequence length), and halfway between the first two, where overheads weigh.
_FIRST_TRENDS = (0.0, 0.5, 1.0, 2.0)
_ROUNDS = 3
# How far the slope of one piece strays from the trend around it (a standard deviation of the elasticity).
_SLOPE_SPREAD = 0.15
# The trend at a place is a mean over pieces within about this distance, in log size: half an octave.
_TREND_WIDTH = 0.35
# The trend is held in what any workload can have.
_TREND_RANGE = (-0.2, 2.2)
# A piece of more points than this is cut (it makes a break of no height): bounds the work on very long curves.
_LONGEST_PIECE = 512
# Twice the log likelihood that a place may lack and still be within 95 % confidence (χ² with one degree of freedom).
_SAME_PLACE = 3.84


@dataclass(frozen=True)
class Break:
    """A break between points `index` and `index + 1`.

    log_jump: rise of the log time there, without the trend between the two points.
    standard_error: of log_jump.
    first, last: with 95 % confidence, the break lies after a point from `first` to `last`.
    """

    index: int
    log_jump: float
    standard_error: float
    first: int
    last: int


@dataclass(frozen=True)
class PiecewiseFit:
    """The fit of one curve.

    breaks: in order.
    levels: fitted log time of each point (points,).
    trend: elasticity over each gap (points − 1,).
    """

    breaks: tuple[Break, ...]
    levels: Floats
    trend: Floats


@dataclass(frozen=True)
class Pieces:
    """The best pieces of each curve.

    log_size: (points,), or (curves, points) where curves have sizes of their own.
    log_time, sigma: (curves, points).
    starts: per curve, the first point of each piece.
    trend: elasticity over each gap (curves, points − 1).
    cost: squared residuals over variance, plus the penalties (curves,).
    freedom: degrees of freedom of the residuals (curves,).
    chi2: squared residuals over variance, about `freedom` where sigma is right (curves,).
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
    """The best pieces of each curve.

    log_size: ascending; (points,) where all curves have the same sizes, else (curves, points), which costs
    curves × points² of memory. log_time, sigma: (curves, points); sigma is the standard error of log_time.
    """
    curves, points = log_time.shape
    cost = np.full(curves, np.inf)
    starts: list[Ints] = [np.zeros(1, dtype=np.intp)] * curves
    trends = np.zeros((curves, max(0, points - 1)))
    near = _nearness(log_size) if points > 1 else np.zeros((0, 0))
    for elasticity in _FIRST_TRENDS if points > 1 else ():
        trend = np.full((curves, points - 1), elasticity)
        for _ in range(_ROUNDS):
            sums = _Sums(log_size, log_time, sigma, trend)
            new_cost, new_starts = _partition(sums)
            for c in np.flatnonzero(new_cost < cost - 1e-9):
                cost[c], starts[c], trends[c] = new_cost[c], new_starts[c], trend[c]
            trend = _trend(sums, _Flat.of(new_starts, points), trend, near)
    flat = _Flat.of(starts, points)
    per_piece = _Sums(log_size, log_time, sigma, trends).cost(flat.curve, flat.start, flat.stop)
    chi2 = np.bincount(flat.curve, per_piece, minlength=curves).astype(np.float64)
    # A piece of one point has no freedom left; their prior leaves the slopes of the others about half a parameter.
    spent = np.bincount(flat.curve, np.where(flat.stop - flat.start > 1, 1.5, 1.0), minlength=curves).astype(np.float64)
    return Pieces(log_size, log_time, sigma, tuple(starts), trends, cost, np.maximum(points - spent, 0.0), chi2)


def join(parts: Sequence[tuple[Pieces, int]], log_size: Floats, log_time: Floats, sigma: Floats) -> Pieces:
    """The pieces of one long curve from those of its consecutive parts, with a break at every cut.

    parts: for each part, the Pieces that hold it and its row there.
    log_size, log_time, sigma: of the whole curve (points,).
    """
    starts, trends, first = [], [], 0
    for pieces, row in parts:
        starts.append(pieces.starts[row] + first)
        trend = pieces.trend[row]
        trends += [trend[:1], trend] if first else [trend]  # the gap at the cut has the trend of the next
        first += pieces.log_time.shape[1]
    return Pieces(
        log_size, log_time[None], sigma[None], (np.concatenate(starts),), np.concatenate(trends)[None],
        cost=np.array([sum(pieces.cost[row] for pieces, row in parts)]),
        freedom=np.array([sum(pieces.freedom[row] for pieces, row in parts)]),
        chi2=np.array([sum(pieces.chi2[row] for pieces, row in parts)]),
    )  # fmt: skip


def fit_pieces(log_size: Floats, log_time: Floats, sigma: Floats) -> tuple[PiecewiseFit, ...]:
    """The best piecewise fit of each curve; arrays as for `find_pieces`.

    >>> size = np.log(np.arange(1.0, 13.0))
    >>> stairs = np.log([[5.0] * 4 + [10.0] * 4 + [15.0] * 4])
    >>> [b.index for b in fit_pieces(size, stairs, np.full((1, 12), 0.01))[0].breaks]
    [3, 7]
    """
    return describe(find_pieces(log_size, log_time, sigma))


def describe(pieces: Pieces) -> tuple[PiecewiseFit, ...]:
    """Breaks and levels of the pieces that were found."""
    sums = _Sums(pieces.log_size, pieces.log_time, pieces.sigma, pieces.trend)
    flat = _Flat.of(pieces.starts, sums.shape[1])
    weight, mean_u, mean_z, suu, suz, _ = sums.moments(flat.curve, flat.start, flat.stop)
    slope = suz / (suu + sums.ridge)
    piece = np.repeat(np.arange(len(flat.start)), flat.stop - flat.start).reshape(sums.shape)
    fitted = mean_z[piece] + slope[piece] * (sums.u - mean_u[piece])
    levels = fitted + sums.offset[:, None] + _integral(pieces.trend, pieces.log_size)
    (second,) = np.nonzero(flat.start > 0)  # the pieces that a break begins; the piece before ends there
    curve, split = flat.curve[second], flat.start[second]
    u = np.broadcast_to(sums.u, sums.shape)
    edge = (u[curve, split - 1] + u[curve, split]) / 2
    (before, before_variance), (after, after_variance) = (
        (
            mean_z[side] + slope[side] * (edge - mean_u[side]),
            1 / weight[side] + (edge - mean_u[side]) ** 2 / (suu[side] + sums.ridge),
        )
        for side in (second - 1, second)
    )
    jumps, errors = after - before, np.sqrt(before_variance + after_variance)
    breaks: list[list[Break]] = [[] for _ in pieces.starts]
    first, last = _places(sums, curve, flat.start[second - 1], split, flat.stop[second])
    columns = (curve, split - 1, jumps, errors, first, last)
    for c, *one in zip(*(column.tolist() for column in columns), strict=True):
        breaks[c].append(Break(*one))
    return tuple(PiecewiseFit(tuple(own), levels[c], pieces.trend[c]) for c, own in enumerate(breaks))


def break_penalty(points: int) -> float:
    """What a break must save in squared residuals over variance. It grows with the number of places that are searched;
    half of what the Bayesian information criterion would ask for place, level and slope, for a spurious break has a
    second hurdle to take (the size of its jump), while a missed one is lost."""
    return 0.5 + 1.5 * log(points)


class _Sums:
    """Running weighted sums over each curve, from which the fit of any piece follows at once.

    u: log size, centred, in the shape of log_size.
    z: log time without the trend, centred (curves, points).
    """

    ridge = _SLOPE_SPREAD**-2.0

    def __init__(self, u: Floats, y: Floats, sigma: Floats, trend: Floats) -> None:
        z = y - _integral(trend, u)
        self.u = u - u.mean(axis=-1, keepdims=True)
        self.offset = z.mean(axis=1)
        z = z - self.offset[:, None]
        weight, wide = sigma**-2.0, np.broadcast_to(self.u, z.shape)
        columns = weight * np.stack([np.ones_like(z), wide, z, wide**2, wide * z, z**2])
        self._sums = np.concatenate([np.zeros((6, len(z), 1)), np.cumsum(columns, axis=2)], axis=2)
        self.shape = z.shape

    def moments(self, curve: Ints | int, start: Ints, stop: Ints) -> tuple[Floats, ...]:
        """Weight, mean u, mean z, and central Suu, Suz, Szz of the points start … stop − 1 of each piece."""
        return _moments(self._sums[:, curve, stop] - self._sums[:, curve, start])

    def cost(self, curve: Ints | int, start: Ints, stop: Ints) -> Floats:
        """Least squares over variance of each piece, slope included."""
        return _cost(self.moments(curve, start, stop))

    def costs_up_to(self, low: int, stop: int) -> Floats:
        """The same for the pieces from low … stop − 1 to `stop`, in every curve (curves, stop − low)."""
        return _cost(_moments(self._sums[:, :, stop : stop + 1] - self._sums[:, :, low:stop]))


def _moments(sums: Floats) -> tuple[Floats, ...]:
    w, wu, wz, wuu, wuz, wzz = sums
    mean_u, mean_z = wu / w, wz / w
    return w, mean_u, mean_z, np.maximum(wuu - wu * mean_u, 0), wuz - wu * mean_z, np.maximum(wzz - wz * mean_z, 0)


def _cost(moments: tuple[Floats, ...]) -> Floats:
    _, _, _, suu, suz, szz = moments
    cost: Floats = np.maximum(szz - suz**2 / (suu + _Sums.ridge), 0.0)  # rounding may leave less than nothing
    return cost


@dataclass(frozen=True)
class _Flat:
    """All pieces of all curves in sequence: their curve, first point, and the point after their last."""

    curve: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, starts: Sequence[Ints], points: int) -> _Flat:
        counts = [len(own) for own in starts]
        start = np.concatenate(list(starts))
        stop = np.append(start[1:], points)
        stop[np.cumsum(counts) - 1] = points
        return cls(np.repeat(np.arange(len(starts)), counts), start, stop)


def _integral(trend: Floats, u: Floats) -> Floats:
    """Log time that the trend alone accounts for (curves, points), 0 at the first point."""
    steps = np.cumsum(trend * np.diff(u), axis=-1)
    return np.concatenate([np.zeros((*steps.shape[:-1], 1)), steps], axis=-1)


def _partition(sums: _Sums) -> tuple[Floats, list[Ints]]:
    """Optimal partitioning of every curve: its penalised cost, and the first point of each of its pieces."""
    curves, points = sums.shape
    penalty = break_penalty(points)
    best = np.zeros((curves, points + 1))
    best[:, 0] = -penalty
    last = np.zeros((curves, points + 1), dtype=np.intp)
    for stop in range(1, points + 1):
        low = max(0, stop - _LONGEST_PIECE)
        total = best[:, low:stop] + sums.costs_up_to(low, stop)
        choice = np.argmin(total, axis=1)
        last[:, stop] = low + choice
        best[:, stop] = total[np.arange(curves), choice] + penalty
    # Many short curves have the same few partitions.
    distinct, which = np.unique(last, axis=0, return_inverse=True)
    found = []
    for previous in distinct.tolist():
        starts, stop = [], points
        while stop > 0:
            stop = previous[stop]
            starts.append(stop)
        found.append(np.array(starts[::-1], dtype=np.intp))
    return best[:, points], [found[i] for i in which.ravel().tolist()]


def _nearness(log_size: Floats) -> Floats:
    """How much each gap counts for the trend at each other: (gaps, gaps), or (curves, gaps, gaps)."""
    gaps = (log_size[..., 1:] + log_size[..., :-1]) / 2
    near: Floats = np.exp(-0.5 * ((gaps[..., :, None] - gaps[..., None, :]) / _TREND_WIDTH) ** 2)
    return near


def _trend(sums: _Sums, pieces: _Flat, trend: Floats, near: Floats) -> Floats:
    """The elasticity over each gap, from the slopes within the pieces around it (nothing steps within a piece).

    near: see `_nearness`.
    """
    _, mean_u, _, suu, suz, _ = sums.moments(pieces.curve, pieces.start, pieces.stop)
    gaps = (sums.u[..., 1:] + sums.u[..., :-1]) / 2
    shared = gaps.ndim == 1
    at = np.searchsorted(gaps, mean_u) if shared else (gaps[pieces.curve] < mean_u[:, None]).sum(axis=1)
    at = np.clip(at, 0, gaps.shape[-1] - 1)
    # Slopes are relative to the trend they were fitted with, where their piece lies.
    weight, weighted_slope = np.zeros_like(trend), np.zeros_like(trend)
    np.add.at(weight, (pieces.curve, at), suu)
    np.add.at(weighted_slope, (pieces.curve, at), suz + suu * trend[pieces.curve, at])

    def blur(values: Floats) -> Floats:
        """Sums over the gaps around each gap (curves, points − 1)."""
        blurred: Floats = values @ near if shared else (values[:, None, :] @ near)[:, 0]
        return blurred

    # As if a piece of middling weight lay everywhere with the mean slope: steadies places with no long piece near.
    total = weight.sum(axis=1, keepdims=True)
    mean_slope = np.divide(weighted_slope.sum(axis=1, keepdims=True), total, out=trend.copy(), where=total > 0)
    blend = (blur(weighted_slope) + sums.ridge * mean_slope) / (blur(weight) + sums.ridge)
    clipped: Floats = np.clip(blend, *_TREND_RANGE)
    return clipped


def _places(sums: _Sums, curve: Ints, start: Ints, split: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """For each break at `split`, the range of last points before it that fit as well, between `start` and `stop`."""
    if not len(split):
        return split, split
    lengths = stop - start - 1  # places tried for each break
    begins = np.cumsum(lengths) - lengths
    own = np.repeat(np.arange(len(split)), lengths)
    tried = np.arange(len(own)) - begins[own] + start[own] + 1
    cost = sums.cost(curve[own], start[own], tried) + sums.cost(curve[own], tried, stop[own])
    within = cost <= (cost[begins + split - start - 1] + _SAME_PLACE)[own]
    first = np.minimum.reduceat(np.where(within, tried, stop[own]), begins)
    last = np.maximum.reduceat(np.where(within, tried, start[own]), begins)
    return first - 1, last - 1
