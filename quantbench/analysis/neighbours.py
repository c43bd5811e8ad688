"""Finds sizes with a lower rate than a nearby size: smaller within 10 %, or within a factor of
two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quantbench.analysis.summary import LayerRow, Point, held_of, rows_of, useful_work

#: relative distance within which a user may change a size
NEAR = 0.10
#: the same as a factor, for sizes in powers of two
DOUBLE = 2
# Smallest loss that is reported: larger for single times without samples, whose repetitions differ
# by a few per cent.
_SMALLEST_LOSS = 0.03
_SMALLEST_LOSS_OF_FIGURES = 0.08
# A larger size that takes at most this much longer counts as free.
_FREE = 0.01


@dataclass(frozen=True)
class BadSize:
    """A size with a lower rate than a better one nearby: smaller within NEAR, or within DOUBLE.

    row, better: rows of both sizes.
    loss: throughput lost against the better size, as a share.
    low, high: bounds of the loss from both intervals; None for times without samples.
    up_to: largest value of `axis` within NEAR above that takes no longer; None if there is none.
    culprit, culprit_at_better: op that loses most time, at both sizes.
    """

    axis: str
    row: LayerRow
    better: LayerRow
    loss: float
    low: float | None
    high: float | None
    up_to: int | None
    culprit: Point
    culprit_at_better: Point

    @property
    def size(self) -> int:
        """Axis value of the slow row."""
        return self.row.axes[self.axis]


def rows_by_dtype(points: Sequence[Point]) -> tuple[LayerRow, ...]:
    """Returns the rows of `rows_of` separately for each dtype, because a table may hold one shape
    in several.
    """
    by_dtype: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_dtype[point.workload.dtype].append(point)
    return tuple(chain.from_iterable(rows_of(by_dtype[dtype]) for dtype in sorted(by_dtype)))


def curves_of_rows(rows: Iterable[LayerRow], axis: str) -> tuple[tuple[LayerRow, ...], ...]:
    """Groups rows with the same provider, dtype and other axes, by ascending `axis`.

    Leaves out rows whose ops, or their timing modes, differ from those of most rows (an op failed
    there).
    """
    curves: dict[tuple[object, ...], list[LayerRow]] = {}
    for row in rows:
        if axis in row.axes:
            key = (row.provider, row.points[0].workload.dtype, held_of(row.axes, axis))
            curves.setdefault(key, []).append(row)
    found = []
    for curve in curves.values():
        curve.sort(key=lambda row: row.axes[axis])
        usual, number = Counter(map(_ops_and_modes, curve)).most_common(1)[0]
        if number < len(curve):
            curve = [row for row in curve if _ops_and_modes(row) == usual]
        found.append(tuple(curve))
    return tuple(found)


def _ops_and_modes(row: LayerRow) -> tuple[tuple[str, str], ...]:
    return tuple([(point.op, point.mode) for point in row.points])


def bad_sizes_on(
    curves: Iterable[Sequence[LayerRow]], axis: str, *, doubles: bool = False
) -> tuple[BadSize, ...]:
    """Finds bad sizes on curves from `curves_of_rows`, largest loss first.

    doubles: whether to compare with sizes within a factor of DOUBLE (tp = 1, 2, 4, 8) instead of
        smaller ones within NEAR; `up_to` is then None.
    """
    found: list[BadSize] = []
    for curve in curves:
        found += _of_curve(curve, axis, doubles=doubles)
    return tuple(sorted(found, key=lambda bad: -bad.loss))


def _of_curve(curve: Sequence[LayerRow], axis: str, *, doubles: bool) -> Iterable[BadSize]:
    sizes = [row.axes[axis] for row in curve]
    times_us = np.array([row.latency_us for row in curve])
    rates = np.array([row.work for row in curve]) / times_us
    for i, row in enumerate(curve):
        size = sizes[i]
        if doubles:
            first = bisect_left(sizes, size / DOUBLE)
            stop = bisect_right(sizes, DOUBLE * size)
        else:
            first = bisect_left(sizes, size * (1 - NEAR))
            stop = i
        others = rates[first:stop]
        if not len(others) or others.max() <= rates[i]:
            continue
        up_to = None
        if not doubles:
            above = times_us[i + 1 : bisect_right(sizes, size * (1 + NEAR))]
            free = np.flatnonzero(above <= row.latency_us * (1 + _FREE))
            up_to = sizes[i + 1 + int(free[-1])] if free.size else None
        bad = _against(row, curve[first + int(np.argmax(others))], axis, up_to)
        if bad is not None:
            yield bad


def _against(row: LayerRow, better: LayerRow, axis: str, up_to: int | None) -> BadSize | None:
    """Returns the loss of one row against another; None if it is small or not significant."""
    ratio = (row.work / row.latency_us) / (better.work / better.latency_us)
    loss = 1 - ratio
    low = None
    high = None
    if has_spread(row) and has_spread(better):
        width = row.half_width + better.half_width
        low = loss - ratio * width
        high = loss + ratio * width
        if low < _SMALLEST_LOSS:
            return None
    elif loss < _SMALLEST_LOSS_OF_FIGURES:
        return None
    return BadSize(axis, row, better, loss, low, high, up_to, *_culprit(row, better))


def has_spread(row: LayerRow) -> bool:
    """Returns whether all points of the row have several samples."""
    return all(point.num_samples > 1 for point in row.points)


def _culprit(row: LayerRow, better: LayerRow) -> tuple[Point, Point]:
    """Returns the op that loses most time against its rate at the better size, and the same op
    there.
    """
    there = {point.op: point for point in better.points}

    def excess_us(point: Point) -> float:
        other = there[point.op]
        growth = useful_work(point.workload) / useful_work(other.workload)
        return point.count * (point.latency_us - other.latency_us * growth)

    culprit = max(row.points, key=excess_us)
    return culprit, there[culprit.op]
